"""nanochat_style: the smallest FP8 linear that people write by hand, after the idea of karpathy/nanochat's `fp8.py`.

One `autograd.Function` over `torch._scaled_mm` with tensorwise scales and no tensor subclass:

    output      = e4m3(x)           @ e4m3(weight).T      fast accumulation
    grad_input  = e5m2(grad_output) @ e4m3(weight)
    grad_weight = e5m2(grad_output).T @ e4m3(x)

Opaque to autograd, each operand is cast once and its codes are kept for the backward pass; a layout that the GEMM
can't take is copied. It checks nothing: sizes must be multiples of 16, the input a matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

AMAX_FLOOR = 1e-12


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x's shape and its 0-dimensional scale_inv; the scale is rounded once, from float64."""
    top = torch.finfo(dtype).max
    scale = (top / x.abs().amax().double().clamp(min=AMAX_FLOOR)).float()
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()


def column_major(codes: Tensor) -> Tensor:
    """The same matrix with its columns contiguous, as the right operand must be."""
    return codes.t().contiguous().t()


class _Matmul(torch.autograd.Function):
    """The three products; x [M, K], weight [N, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_lp, x_inv = to_fp8(x, torch.float8_e4m3fn)
        w_lp, w_inv = to_fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x_lp, x_inv, w_lp, w_inv)
        # weight.t() of a row-major weight is column-major as it is.
        return torch._scaled_mm(
            x_lp, w_lp.t(), scale_a=x_inv, scale_b=w_inv, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Sequence[Tensor | None]:
        (grad_output,) = grad_outputs
        x_lp, x_inv, w_lp, w_inv = ctx.saved_tensors
        g_lp, g_inv = to_fp8(grad_output, torch.float8_e5m2)
        dtype = grad_output.dtype
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = torch._scaled_mm(
                g_lp, column_major(w_lp), scale_a=g_inv, scale_b=w_inv, out_dtype=dtype, use_fast_accum=False
            )
        if ctx.needs_input_grad[1]:
            grad_weight = torch._scaled_mm(
                g_lp.t().contiguous(),
                column_major(x_lp),
                scale_a=g_inv,
                scale_b=x_inv,
                out_dtype=dtype,
                use_fast_accum=False,
            )
        return grad_input, grad_weight


class HandWrittenLinear(nn.Linear):
    """nn.Linear over the three products; x [M, K] of one dtype with the weight, no bias."""

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T`."""
        return _Matmul.apply(input, self.weight)


def linear(layer: nn.Linear, recipe: str) -> nn.Module:
    """The layer with its three products in FP8.

    Raises:
        ValueError: a recipe other than tensorwise, or a layer with a bias.
    """
    if recipe != "tensorwise" or layer.bias is not None:
        raise ValueError(
            f"nanochat_style offers tensorwise without bias, not {recipe!r} with bias={layer.bias is not None}"
        )
    new = HandWrittenLinear(layer.in_features, layer.out_features, bias=False, device="meta")
    new.weight = layer.weight
    return new


PEER = Peer(
    arm="nanochat",
    doc="hand-written autograd.Function over torch._scaled_mm",
    recipes=("tensorwise",),
    modes=("eager", "compile"),
    linear=linear,
)
