"""Recipes as the tests need them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fp8core import RECIPES, Float8LinearRecipeName, Recipe
from fp8core.gemm import backend_named

if TYPE_CHECKING:
    from fp8core.gemm.backend import Backend

TORCHAO = tuple(member.value for member in Float8LinearRecipeName)  # those that torchao.float8 has too


def multiplies(backend: str, name: str) -> bool:
    """Whether a CPU multiplies the recipe's scales by this backend."""
    reason = backend_named(backend).granularity_reason
    return not any(reason("cpu", gemm.granularity) for gemm in RECIPES[name].gemms.values())


def changed(backend: Backend, **attributes: Any) -> Backend:
    """A copy of a backend, with other rules or another product."""
    other = copy.copy(backend)
    vars(other).update(attributes)
    return other


def on_cpu(name: str) -> Recipe:
    """The recipe, emulated where the CPU has no kernel for its scales."""
    recipe = RECIPES[name]
    return recipe if multiplies(recipe.backend, name) else recipe.emulated()


SIXTEENS = tuple(name for name in RECIPES if name != "mxfp4")  # that take all sizes that FP8 does
FP8 = tuple(name for name in RECIPES if not RECIPES[name].is_four_bit)
ON_CPU = tuple(name for name in FP8 if on_cpu(name) is RECIPES[name])  # with an FP8 kernel there
