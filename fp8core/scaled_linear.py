"""The three GEMMs of a Float8Linear as one `autograd.Function`, on the matrices of one rank.

    output      [M, N] = input         [M, K] @ weight.T [K, N]
    grad_input  [M, K] = grad_output   [M, N] @ weight   [N, K]
    grad_weight [N, K] = grad_output.T [N, M] @ input    [M, K]

One function holds all three, since an FP8 operand that crossed autograd into `torch.mm` would meet a high-precision
gradient in the backward pass.

Saved for the backward pass: the input as the FP8 operand of grad_weight, one byte an element instead of two or four,
unless that GEMM is in high precision; the weight in FP8 where the cast of the forward pass makes grad_input's operand
too (one byte an element more than no copy; saves the second cast), else the weight itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fp8core.gemm import backend_named, layout, scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.history import AmaxMemory
from fp8core.inputs.operands import (
    cast_operand,
    cast_operand_pair,
    fused_for_both,
    resolve_kernels,
    serves_both,
)
from fp8core.inputs.sharded import AmaxRequest, shared_amaxes
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from fp8core.cast_stats import CallStats
    from fp8core.history import Amaxes
    from fp8core.inputs.microbatch import WeightCache
    from fp8core.inputs.sharded import TPLayout
    from fp8core.recipe import Gemm, Kernels, Recipe


class Plan(NamedTuple):
    """What the three GEMMs need besides tensors: resolved once for a layer and the shapes of a call.

    Attributes:
        recipe: the layer's.
        amaxes: what delayed and static casts go by; None for dynamic recipes.
        cache: casts of the weight that a `microbatches` block keeps.
        trains: a backward pass can follow.
        tp: how tensor parallelism has cut the layer; None if it has not.
        kernels: who casts input, weight and grad_output; "auto" is left only where each cast must ask.
        stats: what a watched step wants to see of this call's casts; None in any other step.
        codes_only: the input's values are not there, as in `CastInput`; known in a watched step alone.
    """

    recipe: Recipe
    amaxes: Amaxes | None
    cache: WeightCache | None
    trains: bool
    tp: TPLayout | None
    kernels: tuple[Kernels, Kernels, Kernels]
    stats: CallStats | None = None
    codes_only: bool = False

    @classmethod
    def resolve(cls, recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, trains: bool) -> Plan:
        """Return the plan of a layer that nothing has cut, for an input [M, K] and a weight [N, K] like these.

        A gradient has the input's dtype and device and M rows, so the input answers for it.
        """
        output, grad_input, grad_weight = recipe.output, recipe.grad_input, recipe.grad_weight
        kernels = (
            resolve_kernels(x, recipe.kernels, output.a, grad_weight.b),
            resolve_kernels(weight, recipe.kernels, output.b, grad_input.b),
            resolve_kernels(x, recipe.kernels, grad_input.a, grad_weight.a)
            if weight.shape[0]
            else recipe.kernels,
        )
        return cls(recipe, None, None, trains, None, kernels)

    def shared(self, *tensors: AmaxRequest) -> tuple[torch.Tensor | None, ...]:
        """The amaxes of tensors that are parts of larger ones, see `fp8core.inputs.sharded.shared_amaxes`."""
        return shared_amaxes(self.tp, self.recipe, self.amaxes, *tensors)


_Saved = tuple[torch.Tensor | None, torch.Tensor | None]  # see `_saved`
_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]


class _ScaledLinear(torch.autograd.Function):
    """The three GEMMs; input [M, K] with its casts if they are there already, weight [N, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        input_hp: torch.Tensor,
        weight_hp: torch.Tensor,
        given: torch.Tensor | None,
        given_for_grad_weight: torch.Tensor | None,
        plan: Plan,
    ) -> torch.Tensor:
        recipe, amaxes = plan.recipe, plan.amaxes
        for_output, for_grad_weight = recipe.output.a, recipe.grad_weight.b
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        needs_kept = plan.trains and needs_weight
        amax = weight_amax = None
        if plan.tp is not None:
            amax, weight_amax = plan.shared(
                AmaxRequest(input_hp if given is None else None, "input", (for_output, for_grad_weight)),
                AmaxRequest(weight_hp, "weight", (recipe.output.b, recipe.grad_input.b)),
            )
        kernels = plan.kernels[0]
        kept: _Saved = (None, None)
        if given is None and needs_kept:
            lines, lines_0 = cast_operand_pair(
                input_hp, for_output, for_grad_weight, amaxes, "input", kernels=kernels, amax=amax
            )
            kept = _saved(lines_0, input_hp)
        elif given is None:
            lines = cast_operand(input_hp, for_output, 1, amaxes, "input", kernels=kernels, amax=amax)
        else:
            lines = cast_operand(given, for_output, 1)
            if given_for_grad_weight is not None:
                kept = given_for_grad_weight, None
            elif needs_kept and serves_both(for_output, for_grad_weight):
                kept = given, None
            elif needs_kept:  # the shared casts were made where nothing trained
                kept = _saved(
                    cast_operand(input_hp, for_grad_weight, 0, amaxes, "input", kernels=kernels, amax=amax),
                    input_hp,
                )
        weight, weight_kept = _weight_operands(weight_hp, plan, needs_input, weight_amax)
        if not needs_kept:
            kept = None, None
        if plan.stats is not None:
            _show_forward(
                plan.stats, None if plan.codes_only else input_hp, lines, kept, weight_hp, weight, weight_kept
            )
        ctx.save_for_backward(*kept, *weight_kept, weight_amax)
        ctx.plan = plan
        return _product(lines, weight, recipe.output, recipe, input_hp.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> _Gradients:
        # Only where a graph of this pass is recorded can anyone differentiate it again, which is refused
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _gradients_once(ctx, grad_output)
        return _ScaledLinear.gradients(ctx, grad_output)

    @staticmethod
    def gradients(ctx: Any, grad_output: torch.Tensor) -> _Gradients:
        """Return the gradients of the input and of the weight, where needed."""
        kept, kept_scale, weight_kept, weight_scale, weight_amax = ctx.saved_tensors
        plan: Plan = ctx.plan
        recipe, amaxes = plan.recipe, plan.amaxes
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        to_input, to_weight = recipe.grad_input, recipe.grad_weight
        grad_input = grad_weight = None
        amax = None
        if plan.tp is not None:
            (amax,) = plan.shared(AmaxRequest(grad_output, "grad_output", (to_input.a, to_weight.a)))
        kernels = plan.kernels[2] if type(grad_output) is torch.Tensor else recipe.kernels
        if needs_input and needs_weight:
            lines, lines_0 = cast_operand_pair(
                grad_output, to_input.a, to_weight.a, amaxes, "grad_output", kernels=kernels, amax=amax
            )
        elif needs_input:
            lines = cast_operand(
                grad_output, to_input.a, 1, amaxes, "grad_output", kernels=kernels, amax=amax
            )
        else:
            lines_0 = cast_operand(
                grad_output, to_weight.a, 0, amaxes, "grad_output", kernels=kernels, amax=amax
            )
        if needs_input:
            weight: Operand | torch.Tensor
            if weight_scale is not None:
                weight = Operand(weight_kept, weight_scale)
            else:
                weight = cast_operand(
                    weight_kept,
                    to_input.b,
                    0,
                    amaxes,
                    "weight",
                    kernels=plan.kernels[1],
                    amax=weight_amax,
                )
            grad_input = _product(lines, weight, to_input, recipe, grad_output.dtype)
            if plan.stats is not None:
                plan.stats.saw("grad_output", "grad_input", grad_output, lines)
                if weight_scale is None:
                    plan.stats.saw("weight", "grad_input", weight_kept, weight, turned=True)
        if needs_weight:
            x = cast_operand(kept, None, 0) if kept_scale is None else Operand(kept, kept_scale)
            grad_weight = _product(lines_0, x, to_weight, recipe, grad_output.dtype)
            if plan.stats is not None:
                plan.stats.saw("grad_output", "grad_weight", grad_output, lines_0, turned=True)
        if plan.stats is not None:
            plan.stats.commit()
        return grad_input, grad_weight, None, None, None


_gradients_once = torch.autograd.function.once_differentiable(_ScaledLinear.gradients)


def _saved(lines: Operand | torch.Tensor, x: torch.Tensor) -> _Saved:
    """What to save of an operand: its codes [K, M] and scales; else the tensor that it consists of, and None.

    A Float8Tensor is saved itself: FSDP2 frees and gathers the memory of the one that it knows.
    """
    return (x, None) if isinstance(x, Float8Tensor) or not isinstance(lines, Operand) else lines


def _show_forward(
    stats: CallStats,
    x: torch.Tensor | None,
    lines: Operand | torch.Tensor,
    kept: _Saved,
    weight_hp: torch.Tensor,
    weight: Operand | torch.Tensor,
    weight_kept: _Saved,
) -> None:
    """The casts that a forward pass makes, those for the backward pass included."""
    stats.saw("input", "output", x, lines)
    codes, scale_inv = kept
    if codes is not None:
        again = codes if scale_inv is None else Operand(codes, scale_inv)
        stats.saw("input", "grad_weight", x, again, turned=scale_inv is not None)
    stats.saw("weight", "output", weight_hp, weight)
    codes, scale_inv = weight_kept
    if codes is not None and scale_inv is not None:
        stats.saw("weight", "grad_input", weight_hp, Operand(codes, scale_inv), turned=True)


def _weight_operands(
    weight: torch.Tensor, plan: Plan, needed_again: bool, amax: torch.Tensor | None
) -> tuple[Operand | torch.Tensor, _Saved]:
    """weight [N, K] for the output GEMM, and what to save for grad_input, see `_saved`.

    That is an operand already where one cast makes both; else the weight itself, cast in the backward pass, or
    within `microbatches` its second cast, made here so that it is made once.
    """
    recipe, amaxes, kernels = plan.recipe, plan.amaxes, plan.kernels[1]
    first, second = recipe.output.b, recipe.grad_input.b
    if isinstance(weight, Float8Tensor) and isinstance(amaxes, AmaxMemory):
        amaxes.record_gathered()
    again = plan.trains and needed_again
    if plan.cache is not None and not isinstance(weight, Float8Tensor):
        lines, lines_0 = plan.cache.operands(
            weight,
            lambda: cast_operand_pair(weight, first, second, amaxes, "weight", kernels=kernels, amax=amax),
        )
    elif again and fused_for_both(weight, first, second, kernels):
        lines, lines_0 = cast_operand_pair(
            weight, first, second, amaxes, "weight", kernels=kernels, amax=amax
        )
    else:
        lines = cast_operand(weight, first, 1, amaxes, "weight", kernels=kernels, amax=amax)
        return lines, (weight if again else None, None)
    return lines, _saved(lines_0, weight) if again else (None, None)


def _product(
    a: Operand | torch.Tensor, b_t: Operand | torch.Tensor, gemm: Gemm, recipe: Recipe, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] @ b_t [N, K].T in FP8 if the operands are, else in high precision; both contract their last dimension."""
    if not isinstance(a, Operand) or not isinstance(b_t, Operand):
        if isinstance(a, Operand) or isinstance(b_t, Operand):
            raise TypeError(
                f"recipe {recipe} multiplies in high precision, but one operand consists of FP8 codes; pass .dequantize()"
            )
        return a @ b_t.t().to(a.dtype)
    backend = backend_named(recipe.backend)
    codes, scale_inv = b_t
    # Of one column .t() would leave strides that the rowwise kernel must repair
    if scale_inv.dim():
        lines, groups = scale_inv.shape
        scale_inv = scale_inv.reshape(1, lines) if groups == 1 else scale_inv.t()
    left, right = a, Operand(codes.t(), scale_inv)
    if backend.is_fp8:
        left, right = layout.arrange(left, right, pad=recipe.pad_inner_dim)
    dtype = torch.bfloat16 if gemm.granularity in backend.bf16_only else out_dtype
    product = scaled_mm(left, right, dtype, gemm.fast_accum, recipe.backend)
    if recipe.pad_inner_dim:
        product = product[:, : codes.shape[0]]
    return product if product.dtype == out_dtype else product.to(out_dtype)
