"""Parts of a recipe, each alone: which operand, which GEMM and which format of the gradients costs loss.

    only_input, only_weight, only_grad_output    one operand is rounded, wherever the recipe casts it
    only_output, only_grad_input, only_grad_weight   one GEMM takes the recipe's casts
    e4m3_gradients, e5m2_gradients               grad_output in the format that the recipe does not take

All are emulated, since no kernel multiplies FP8 by high precision; what they are held against is the recipe's own
emulation (`RECIPE_golden`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8core.formats import native_pair
from harness.store.arm import GRAD_FORMAT, ONLY_GEMM, ONLY_OPERAND
from harness.training.rounded import round_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Gemm, Recipe
    from harness.training.setup import Trainee

FORMATS = dict(zip(("e4m3", "e5m2"), native_pair(), strict=True))


def applies(recipe: Recipe, part: str) -> bool:
    """Whether a recipe has this part and more, and can be emulated without amaxes of earlier steps."""
    if recipe.scaling != "dynamic":
        return False
    if part in ONLY_GEMM:
        return recipe.gemms[ONLY_GEMM[part]].is_fp8
    if part in GRAD_FORMAT:
        own = {g.a.format.short for g in (recipe.grad_input, recipe.grad_weight) if g.a is not None}
        return own != {FORMATS[GRAD_FORMAT[part]].short}
    return True


def recipe_of(recipe: Recipe, part: str) -> Recipe:
    """The emulated recipe of an arm; where one operand is rounded alone, `alteration` leaves out the others."""
    if part in ONLY_GEMM:
        recipe = recipe.in_high_precision(*(gemm for gemm in recipe.gemms if gemm != ONLY_GEMM[part]))
    if part in GRAD_FORMAT:
        recipe = _with_gradients(recipe, GRAD_FORMAT[part])
    return recipe.emulated()


def alteration(part: str) -> Callable[[Trainee], None] | None:
    """What is done to the layers of an arm before its first step; None for arms that round no operand alone."""
    operand = ONLY_OPERAND.get(part)
    return None if operand is None else lambda trainee: round_only(trainee.model, (operand,))


def _with_gradients(recipe: Recipe, name: str) -> Recipe:
    """The recipe with every cast of grad_output in another format."""

    def recast(gemm: Gemm) -> Gemm:
        return gemm if gemm.a is None else replace(gemm, a=replace(gemm.a, format=FORMATS[name]))

    return replace(
        recipe,
        name=f"{recipe.name}-{name}_gradients",
        grad_input=recast(recipe.grad_input),
        grad_weight=recast(recipe.grad_weight),
    )
