"""Recipes as the tests need them."""

from __future__ import annotations

from fp8core import RECIPES, Float8LinearRecipeName, Recipe
from fp8core.gemm import backend_named

TORCHAO = tuple(member.value for member in Float8LinearRecipeName)  # those that torchao.float8 has too


def on_cpu(name: str) -> Recipe:
    """The recipe, emulated where the CPU has no kernel for its scales."""
    recipe = RECIPES[name]
    rules = backend_named(recipe.backend)
    lacks = any(rules.granularity_reason("cpu", gemm.granularity) for gemm in recipe.gemms.values())
    return recipe.emulated() if lacks else recipe


ON_CPU = tuple(name for name in RECIPES if on_cpu(name) is RECIPES[name])  # with an FP8 kernel there
