"""FP8 layers of one's own, from fp8core's functions: no module, no conversion, no state.

`MyLinear` calls `scaled_linear` for all three products. `Mine` is an autograd function of one's own, whose casts, saved tensors
and products are in plain view, to be changed. `before_gather` and `after_gather` are what the hooks of a weight that FSDP2
gathers in FP8 do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8core import Float8Tensor, quantize, scaled_linear, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class MyLinear(nn.Linear):
    """All of an FP8 layer, by a recipe's name."""

    recipe = "rowwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The bias stays outside, in high precision."""
        y = scaled_linear(x, self.weight, self.recipe)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Mine(torch.autograd.Function):
    """x [M, K] @ weight.T [K, N], tensorwise: one cast of each tensor, viewed for both of its products."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Saved: codes of both, a byte an element."""
        x_codes, weight_codes = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(x_codes.qdata, x_codes.scale_inv, weight_codes.qdata, weight_codes.scale_inv)
        ctx.dtypes = x.dtype, weight.dtype
        return scaled_mm(x_codes, weight_codes.t(), x.dtype, use_fast_accum=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Left operands lie row-major, right ones column-major: what does not, is copied."""
        (x, x_scale, weight, weight_scale), (dtype, weight_dtype) = ctx.saved_tensors, ctx.dtypes
        codes = quantize(grad, E5M2)
        grad_x = scaled_mm(codes, Float8Tensor(turned(weight).t(), weight_scale, dtype), dtype)
        left = Float8Tensor(turned(codes.qdata), codes.scale_inv, dtype)
        return grad_x, scaled_mm(left, Float8Tensor(turned(x).t(), x_scale, dtype), dtype).to(weight_dtype)


def turned(codes: torch.Tensor) -> torch.Tensor:
    """codes.t(), laid out anew."""
    return codes.t().contiguous()


def before_gather(shard: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For an `fsdp_pre_all_gather`: codes of this rank's rows, to be sent, and the scale of the whole weight.

    `amax` is float32 and of all ranks: `shard.abs().amax().float()`, then an all-reduce by maximum.
    """
    largest = torch.full_like(amax, torch.finfo(E4M3).max)
    scale = largest / amax.clamp(min=1e-12)
    return (shard.float() * scale).clamp(-largest, largest).to(E4M3), scale.reciprocal()


def after_gather(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> Float8Tensor:
    """For an `fsdp_post_all_gather`: the weight that `scaled_linear` reads, of the recipe "tensorwise"."""
    return Float8Tensor(codes, scale_inv, dtype)
