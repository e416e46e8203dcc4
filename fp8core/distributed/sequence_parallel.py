"""Sequence parallelism's collectives in FP8: activations are gathered, and gradients too, as one byte an element.

    input        a part of the tokens on each rank -> cast there -> gathered codes [M, K]       forward pass
    grad_output  likewise, where the output was reduced and scattered                            backward pass

What a rank casts is a part of what shares a scale, so tensorwise scales go by the largest amax of all parts and
codes equal those that one process would make. Codes travel as uint8, which every backend takes (gloo refuses FP8).

A rowwise recipe reads the input twice: scaled by token for the output, and by feature, over all tokens, for
grad_weight. Both sets of codes are gathered, two bytes an element, and both are exact; where nothing trains one is
enough. What is gained over bfloat16 is then the cast, not bytes.

Compiled, a tensor that crosses autograd must be what Dynamo expects, a plain one: it traces a backward pass before it has
seen a gradient. What was gathered in FP8 is therefore decoded and cast again by the layers that read it, which gives the
same codes (tensorwise: the decoded amax is the amax). Rowwise it would be rounded twice, so a module's input is gathered
as it is there: no more bytes than two sets of codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8core.cast import scale_and_cast
from fp8core.history import amaxes_of_pass, max_over_ranks
from fp8core.inputs.operands import cast_one, serves_both
from fp8core.inputs.sharded import AmaxRequest, TPLayout, shared_amaxes
from fp8core.inputs.shared_input import CastInput, input_casts, reads_for_grad_weight
from fp8core.inputs.two_casts import TwoCasts
from fp8core.observers import GATHERS, Gathered
from fp8core.scaling import amax as amax_of
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from fp8core.history import Amaxes
    from fp8core.linear import Float8Linear
    from fp8core.recipe import Cast, Recipe

REPLICATED = (Replicate(),)


def gather_reason(recipe: Recipe) -> str | None:
    """Why the input of layers of this recipe can't be gathered in FP8; None if it can."""
    for_output, for_grad_weight = input_casts(recipe)
    plain = "gather it in high precision: torch's ColwiseParallel, or PrepareModuleInput"
    if for_output is None or for_grad_weight is None:
        return f"recipe {recipe} multiplies the input in high precision too; {plain}"
    if not {for_output.granularity, for_grad_weight.granularity} <= {"tensorwise", "rowwise"}:
        return f"recipe {recipe} scales blocks of tokens, which the parts of ranks don't hold whole; {plain}"
    return None


def gather_input(x: DTensor, layer: Float8Linear) -> CastInput:
    """A layer's input, of which each rank holds some tokens, cast and gathered.

    Args:
        x: [..., K], `Shard` of any but its last dimension.
        layer: that reads it; of a recipe that `gather_reason` lets pass.

    Returns:
        CastInput of all tokens; gradients flow to x's parts.
    """
    memory = amaxes_of_pass(layer.amaxes, torch.is_grad_enabled())
    codes, again = _both_gathered(x, layer.recipe, memory, reads_for_grad_weight(layer))
    # Of whatever reads it by mistake, NaN
    place: DTensor = _AsGathered.apply(x, x.to_local().detach().new_full((), torch.nan).expand(x.shape))
    return CastInput(place, codes, again, input_casts(layer.recipe), codes_only=True)


def gather_module_input(x: DTensor, layer: Float8Linear) -> DTensor:
    """Gathers the input of a module whose layers are like this one: a DTensor of a Float8Tensor, or of `TwoCasts`."""
    casts = input_casts(layer.recipe)
    if torch.compiler.is_compiling():
        if not serves_both(*casts):
            return x.redistribute(placements=REPLICATED)
        codes, _ = _both_gathered(x, layer.recipe, None, False)
        decoded: DTensor = _AsGathered.apply(x, codes.dequantize().view(x.shape))
        return decoded
    codes, again = _both_gathered(x, layer.recipe, None, reads_for_grad_weight(layer))
    one = serves_both(*casts)
    local = codes.view(x.shape) if one else TwoCasts(x.shape, codes, again, casts)
    wrapped: DTensor = _AsGathered.apply(x, local)
    return wrapped


def scatter_output(y: DTensor, placement: Shard, layer: Float8Linear) -> DTensor:
    """Sums the parts of an output and gives each rank its tokens; the gradient is cast, then gathered as FP8.

    Args:
        y: [..., N], `Partial`.
        placement: of the result, `Shard` of any but the last dimension.
        layer: whose output it is; grad_output must be cast once for both GEMMs.
    """
    scattered: DTensor = _Scattered.apply(y, placement, layer)
    return scattered


def _both_gathered(
    x: DTensor, recipe: Recipe, memory: Amaxes | None, trains: bool
) -> tuple[Float8Tensor, Float8Tensor | None]:
    """Codes [M, K] for the output GEMM, and for grad_weight if it will run."""
    first, second = input_casts(recipe)
    assert first is not None
    assert second is not None
    codes = _gathered_cast(x, first, recipe, memory, "input").view(-1, x.shape[-1])
    assert isinstance(codes, Float8Tensor)
    if not trains:
        return codes, None
    return codes, codes if serves_both(first, second) else _gathered_by_feature(x, second)


def _gathered_cast(x: DTensor, cast: Cast, recipe: Recipe, memory: Amaxes | None, role: str) -> Float8Tensor:
    """x's parts cast along the last dimension and gathered: a Float8Tensor of x's shape."""
    with torch.no_grad():
        part = x.to_local()
        flat = part.reshape(-1, part.shape[-1])
        tp = TPLayout(
            x.device_mesh, 1 if role == "input" else 0
        )  # by tokens, so its parts share a scale in any layer
        (amax,) = shared_amaxes(tp, recipe, memory, AmaxRequest(flat, role, (cast,)))
        lp = cast_one(flat, cast, 1, memory, role, kernels=recipe.kernels, amax=amax)
        assert isinstance(lp, Float8Tensor)
        codes = _gathered(lp.qdata.view(part.shape), x)
        scale_inv = lp.scale_inv
        if scale_inv.dim():
            scale_inv = _gathered(scale_inv.view(*part.shape[:-1], 1), x)
        whole = Float8Tensor(codes, scale_inv, x.dtype, cast.granularity)
        for observe in GATHERS:
            observe(Gathered(flat, cast, 1, memory, role, lp, whole, x))
        return whole


def _gathered_by_feature(x: DTensor, cast: Cast) -> Float8Tensor:
    """[M, K] with one scale for each feature, over the tokens of all ranks."""
    with torch.no_grad():
        part = x.to_local()
        flat = part.reshape(-1, part.shape[-1])
        whole = max_over_ranks(amax_of(flat, "rowwise", 0), x.device_mesh.get_group())
        codes, scale_inv = scale_and_cast(
            flat, cast.format, "rowwise", dim=0, power_of_two=cast.power_of_two, known_amax=whole
        )
        gathered = _gathered(codes.view(part.shape), x)
        all_tokens = Float8Tensor(gathered.reshape(-1, part.shape[-1]), scale_inv, x.dtype, "rowwise")
        local = Float8Tensor(codes, scale_inv, x.dtype, "rowwise")
        for observe in GATHERS:
            observe(Gathered(flat, cast, 0, None, "input", local, all_tokens, x))
        return all_tokens


def _gathered(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Parts that lie as those of `like` do, all of them on each rank; FP8 travels as bytes."""
    dtype = part.dtype
    if part.element_size() == 1:
        part = part.view(torch.uint8)
    shape = torch.Size((*like.shape[:-1], part.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(
        part.contiguous(), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    whole = parts.redistribute(placements=REPLICATED).to_local()
    return whole.contiguous().view(dtype)


class _AsGathered(torch.autograd.Function):
    """The place in the graph of a gathered tensor, with its codes or without values; its gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, codes: torch.Tensor) -> DTensor:
        ctx.placements = x.placements
        return DTensor.from_local(codes, x.device_mesh, REPLICATED, run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return grad.redistribute(placements=ctx.placements), None


class _Scattered(torch.autograd.Function):
    """Reduce-scatter forward, FP8 all-gather backward."""

    @staticmethod
    def forward(ctx: Any, y: DTensor, placement: Shard, layer: Float8Linear) -> DTensor:
        ctx.layer = layer
        return y.redistribute(placements=(placement,))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        layer = ctx.layer
        cast = layer.recipe.grad_input.a
        codes = _gathered_cast(grad, cast, layer.recipe, layer.amaxes, "grad_output")
        whole = codes.dequantize() if torch.compiler.is_compiling() else codes
        return DTensor.from_local(whole, grad.device_mesh, REPLICATED, run_check=False), None, None
