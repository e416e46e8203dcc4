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
from fp8core.grad_amax import amax_of
from fp8core.history import AmaxMemory
from fp8core.operands import cast_both, cast_one, made_together, serves_both
from fp8core.sharded import Seen, by_own_amax, shared_amaxes
from fp8core.shared_input import input_casts
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from fp8core.gemm.layout import Scaled
    from fp8core.history import Amaxes
    from fp8core.microbatch import WeightCache
    from fp8core.recipe import Cast, Gemm, Recipe
    from fp8core.sharded import Cut

_VIEWS = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
)  # autograd nodes whose gradient is a view of the gradient that they receive


class Plan(NamedTuple):
    """What the three GEMMs need besides tensors. `trains`: a backward pass can follow."""

    recipe: Recipe
    amaxes: Amaxes | None
    cache: WeightCache | None
    trains: bool
    cut: Cut | None

    def shared(self, *tensors: Seen) -> tuple[torch.Tensor | None, ...]:
        """The amaxes of tensors that are parts of larger ones, see `fp8core.sharded.shared_amaxes`."""
        return shared_amaxes(self.cut, self.recipe, self.amaxes, *tensors)

    @property
    def reads_grad_amax(self) -> bool:
        """The cast of grad_output goes by its own amax, which takes a pass over it unless its producer has it."""
        casts = self.recipe.grad_input.a, self.recipe.grad_weight.a
        return any(c is not None and by_own_amax(c, self.amaxes, "grad_output") for c in casts)

    def cast_one(
        self, x: torch.Tensor, cast: Cast | None, dim: int, role: str, amax: torch.Tensor | None
    ) -> torch.Tensor:
        """`fp8core.operands.cast_one` with the layer's amaxes, as its recipe says."""
        return cast_one(x, cast, dim, self.amaxes, role, kernels=self.recipe.kernels, amax=amax)

    def cast_both(
        self,
        x: torch.Tensor,
        along_1: Cast | None,
        along_0: Cast | None,
        role: str,
        amax: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`fp8core.operands.cast_both` likewise."""
        return cast_both(x, along_1, along_0, self.amaxes, role, kernels=self.recipe.kernels, amax=amax)


_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]
_SCALED = (Float8Tensor, layout.Operand)


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
        recipe = plan.recipe
        casts = input_casts(recipe)
        input_lp, kept = given, given_for_grad_weight
        needs_kept = plan.trains and ctx.needs_input_grad[1]
        amax = weight_amax = None
        if plan.cut is not None:
            amax, weight_amax = plan.shared(
                Seen(input_hp if input_lp is None else None, "input", casts),
                Seen(weight_hp, "weight", (recipe.output.b, recipe.grad_input.b)),
            )
        if input_lp is None and needs_kept:
            input_lp, kept = plan.cast_both(input_hp, *casts, "input", amax)
        elif input_lp is None:
            input_lp = plan.cast_one(input_hp, casts[0], 1, "input", amax)
        elif kept is None and needs_kept:
            # One cast serves both, or the shared ones were made where nothing trained
            kept = input_lp if serves_both(*casts) else plan.cast_one(input_hp, casts[1], 0, "input", amax)
        weight_lp, weight_kept = _weight_operands(weight_hp, plan, ctx.needs_input_grad[0], weight_amax)
        ctx.save_for_backward(kept if needs_kept else None, weight_kept, weight_amax)
        ctx.plan = plan
        return _matmul(input_lp, _transposed(weight_lp), recipe.output, recipe, input_hp.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> _Gradients:
        # Only where a graph of this pass is recorded can anyone differentiate it again, which is refused
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _gradients_once(ctx, grad_output)
        return _ScaledLinear.gradients(ctx, grad_output)

    @staticmethod
    def gradients(ctx: Any, grad_output: torch.Tensor) -> _Gradients:
        """Of the input and of the weight, where needed."""
        kept, weight_kept, weight_amax = ctx.saved_tensors
        plan, recipe = ctx.plan, ctx.plan.recipe
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        for_input, for_weight = recipe.grad_input.a, recipe.grad_weight.a
        grad_input = grad_weight = None
        amax = amax_of(grad_output)
        if plan.cut is not None:
            (amax,) = plan.shared(Seen(grad_output, "grad_output", (for_input, for_weight), amax))
        if needs_input and needs_weight:
            grad, grad_gw = plan.cast_both(grad_output, for_input, for_weight, "grad_output", amax)
        elif needs_input:
            grad = plan.cast_one(grad_output, for_input, 1, "grad_output", amax)
        else:
            grad_gw = plan.cast_one(grad_output, for_weight, 0, "grad_output", amax)
        if needs_input:
            weight = plan.cast_one(weight_kept, recipe.grad_input.b, 0, "weight", weight_amax)
            grad_input = _matmul(grad, weight, recipe.grad_input, recipe, grad_output.dtype)
        if needs_weight:
            grad_weight = _matmul(_transposed(grad_gw), kept, recipe.grad_weight, recipe, grad_output.dtype)
        return grad_input, grad_weight, None, None, None


_gradients_once = torch.autograd.function.once_differentiable(_ScaledLinear.gradients)


def reads_grad_amax(output: torch.Tensor) -> bool:
    """Whether a Float8Linear made this tensor, maybe reshaped, and its backward pass goes by the gradient's amax."""
    node = output.grad_fn
    while node is not None and type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    plan = getattr(node, "plan", None)
    return isinstance(plan, Plan) and plan.reads_grad_amax


def _transposed(x: torch.Tensor) -> Scaled | torch.Tensor:
    return layout.transposed(x) if isinstance(x, Float8Tensor) else x.t()


def _weight_operands(
    weight: torch.Tensor, plan: Plan, needed_again: bool, amax: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight [N, K] for the output GEMM, and what grad_input's operand will be made from.

    That is an operand already where one cast makes both; else the weight itself, cast in the backward pass, or
    within `microbatches` its second cast, made here so that it is made once.
    """
    recipe = plan.recipe
    first, second = recipe.output.b, recipe.grad_input.b
    if isinstance(weight, Float8Tensor) and isinstance(plan.amaxes, AmaxMemory):
        plan.amaxes.record_gathered()
    again = plan.trains and needed_again
    if plan.cache is not None and not isinstance(weight, Float8Tensor):
        lp, lp_again = plan.cache.operands(
            weight, lambda: plan.cast_both(weight, first, second, "weight", amax)
        )
        return lp, lp_again if again else None
    if again and made_together(weight, first, second, recipe.kernels):
        return plan.cast_both(weight, first, second, "weight", amax)
    return plan.cast_one(weight, first, 1, "weight", amax), weight if again else None


def _matmul(
    a: Scaled | torch.Tensor,
    b: Scaled | torch.Tensor,
    gemm: Gemm,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] @ b [K, N] in FP8 if the operands are, else in high precision."""
    if not isinstance(a, _SCALED) or not isinstance(b, _SCALED):
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        return a @ b.to(a.dtype)
    backend = backend_named(recipe.backend)
    left: Scaled = a
    right: Scaled = b
    if backend.is_fp8:
        left, right = layout.arrange(a, b, pad=recipe.pad_inner_dim)
    dtype = backend.result_dtype(gemm.granularity, out_dtype)
    product = scaled_mm(left, right, dtype, gemm.fast_accum, recipe.backend)
    return (product[:, : b.qdata.shape[1]] if recipe.pad_inner_dim else product).to(out_dtype)
