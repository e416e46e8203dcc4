"""Parts of a recipe, each alone: which operand, which GEMM and which format of the gradients costs loss.

    only_input, only_weight, only_grad_output    one operand is rounded, wherever the recipe casts it
    only_output, only_grad_input, only_grad_weight   one GEMM takes the recipe's casts
    e4m3_gradients, e5m2_gradients               grad_output in the format that the recipe does not take
    nearest, no_hadamard, 1x16_weight            four bits without stochastic rounding, without the Hadamard transform, with
                                                 scales of 16 neighbours where the weight has those of squares

All are emulated, since no kernel multiplies FP8 by high precision; what they are held against is the recipe's own
emulation (`RECIPE_golden`; of four bits the recipe itself).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8core import Float8Linear, quantize
from fp8core.formats import native_pair
from fp8core.inputs.shared_input import after_autocast
from fp8core.replace import take_over
from harness.store.case import GRAD_FORMAT, KNOBS, ONLY_GEMM, ONLY_OPERAND
from harness.training.setup import replace_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fp8core.recipe import Cast, Gemm, Recipe
    from harness.training.setup import Trainee


OPERANDS = ("input", "weight", "grad_output")


class RoundedLinear(nn.Linear):
    """An nn.Linear in high precision of which some operands have been rounded to FP8.

    Attributes:
        recipe: whose casts they are; a dynamic one, since nothing remembers amaxes here.
        operands: which of `OPERANDS` are rounded, wherever the recipe casts them.
    """

    recipe: Recipe
    operands: frozenset[str]

    @classmethod
    def from_float8(cls, layer: Float8Linear, operands: Collection[str]) -> RoundedLinear:
        """A layer that shares the parameters of a Float8Linear and rounds only these operands."""
        new = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        take_over(new, layer)
        new.recipe, new.operands = layer.recipe, frozenset(operands)
        return new

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias` of an input of floating point, [..., in_features]."""
        rows = after_autocast(input).reshape(-1, self.in_features)
        with torch.autocast(rows.device.type, enabled=False):
            output = _RoundedProducts.apply(rows, self.weight, self)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def rounded(self, operand: str, x: Tensor, cast: Cast | None, dim: int) -> Tensor:
        """The operand x as its GEMM reads it, contracted over `dim`: rounded to FP8 and back, or x itself."""
        if cast is None or operand not in self.operands:
            return x
        codes = quantize(
            x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two, mx_mode=cast.mx_mode
        )
        return codes.dequantize()


class _RoundedProducts(torch.autograd.Function):
    """The three GEMMs; input [M, K], weight [N, K]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: RoundedLinear) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        gemm = layer.recipe.output
        weight = layer.rounded("weight", weight, gemm.b, 1)
        return _product(layer.rounded("input", input, gemm.a, 1), weight.t(), input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        layer: RoundedLinear = ctx.layer
        to_input, to_weight = layer.recipe.grad_input, layer.recipe.grad_weight
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            left = layer.rounded("grad_output", grad_output, to_input.a, 1)
            grad_input = _product(left, layer.rounded("weight", weight, to_input.b, 0), input.dtype)
        if ctx.needs_input_grad[1]:
            left = layer.rounded("grad_output", grad_output, to_weight.a, 0).t()
            grad_weight = _product(left, layer.rounded("input", input, to_weight.b, 0), weight.dtype)
        return grad_input, grad_weight, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(dtype)


def round_only(model: nn.Module, operands: Collection[str]) -> None:
    """Replace every Float8Linear of a model, in place, by one that rounds only these operands."""
    replace_layers(model, lambda layer: RoundedLinear.from_float8(layer, operands))


FORMATS = dict(zip(("e4m3", "e5m2"), native_pair(), strict=True))


def applies(recipe: Recipe, part: str) -> bool:
    """Whether a recipe has this part and more, and can be emulated without amaxes of earlier steps."""
    if recipe.scaling != "dynamic":
        return False
    if part in ONLY_GEMM:
        return recipe.gemms[ONLY_GEMM[part]].is_fp8
    if part in KNOBS:
        return _with_knob(recipe, part).gemms != recipe.gemms
    if recipe.is_four_bit:  # there are no other four bits for gradients; `quantize` rounds to FP8 alone
        return False
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
    if part in KNOBS:
        recipe = _with_knob(recipe, part)
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


def _with_knob(recipe: Recipe, knob: str) -> Recipe:
    """The recipe with one knob of its casts to four bits turned off; equal to it where none has that knob."""

    def recast(cast: Cast | None) -> Cast | None:
        if cast is None or not cast.is_four_bit:
            return cast
        if knob == "nearest":
            return replace(cast, rounding="nearest")
        if knob == "no_hadamard":
            return replace(cast, hadamard=None)
        return replace(cast, granularity="1x16") if cast.granularity == "16x16" else cast

    gemms: dict[str, Any] = {
        name: replace(gemm, a=recast(gemm.a), b=recast(gemm.b)) for name, gemm in recipe.gemms.items()
    }
    return replace(recipe, name=f"{recipe.name}-{knob}", **gemms)
