"""Codes that RMSNorm and SwiGLU write in place of their result, against their formulas in float64.

The kernels compute y in float32, round it to the input's dtype and cast that. How far float32 takes y from its float64
value is bounded, so the two ends of that interval are rounded and cast independently: a code must be that of either end
or between. The ends have different codes only where y lies within the float32 error of a tie. That is so for few
elements, whose share is limited by `MOST_OPEN`; of all others the code must be the very one.

    |y32 - y| <= e * |y| + 2**-120       e of RMSNorm  2**-24 * (16 + sqrt(K)): a sum of K squares in a tree
                                         e of SwiGLU   2**-23 * (8 + |gate|):   exp(-gate) by 2**(-gate * log2(e))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.producers import RMSNorm
from fp8core.verify.operands import matrix
from fp8core.verify.oracle import CHUNK, rounded, tiles

if TYPE_CHECKING:
    from fp8core.producers import SwiGLU
    from fp8core.verify.oracle import TiledOperand

MOST_OPEN = 0.01  # of the elements of a tensor: that lie so near a tie that either code is right
_TINY = 2.0**-120  # float32 underflow of a factor
_SCALE_ERROR = 2.0**-22  # of 1 / scale_inv, where the scale itself is not known


def result_bounds(module: RMSNorm | SwiGLU, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(nearer to zero, farther from it) of what a producer may compute in float32, in its inputs' dtype.

    Args:
        module: the producer.
        tensors: x of RMSNorm; gate and up of SwiGLU; [..., K].

    Returns:
        both [M, K].
    """
    matrices = [matrix(t.detach()) for t in tensors]
    near, far = (torch.empty_like(matrices[0], memory_format=torch.contiguous_format) for _ in "nf")
    K = near.shape[1]
    for rows, _ in tiles(near.shape[0], K, max(CHUNK, K)):
        x, *up = (t[rows].double() for t in matrices)
        if isinstance(module, RMSNorm):
            mean = x.square().sum(1, keepdim=True).float().double() / K  # float32: Inf where squares overflow
            y = x * torch.rsqrt(mean + module.eps) * module.weight.detach().double()
            relative: float | torch.Tensor = 2.0**-24 * (16 + K**0.5)
        else:
            y = x * torch.sigmoid(x) * up[0]
            relative = 2.0**-23 * (8 + x.abs())
        size = y.abs()
        error = size * relative + _TINY
        near[rows] = torch.copysign((size - error).clamp(min=0), y).float().to(near.dtype)
        far[rows] = torch.copysign(size + error, y).float().to(near.dtype)
    return near, far


def produced_fault(got: TiledOperand, near: TiledOperand, far: TiledOperand) -> str:
    """How codes and scales differ from both casts of `result_bounds`, and from all between; "" if they don't."""
    dtype, shape = near.dtype, near.x.shape
    if (got.dtype, got.x.shape) != (dtype, shape):
        return f"codes are {got.dtype} {list(got.x.shape)}, expected {dtype} {list(shape)}"
    assert near.scale is not None
    assert far.scale is not None
    known = torch.equal(near.scale, far.scale)
    wrong = scales = undecided = 0
    for part in tiles(*shape):
        decoding = got.spread(got.scale_inv, *part)
        scales += _outside(decoding, *(end.spread(end.scale_inv, *part) for end in (near, far)))
        if known:
            low, high = near.codes(*part), far.codes(*part)
        else:  # the scale is that of the result itself, which is known to within float32 only
            low, high = (
                rounded(end.hp(*part) / decoding * factor, dtype)
                for end, factor in ((near, 1 - _SCALE_ERROR), (far, 1 + _SCALE_ERROR))
            )
        wrong += _outside(got.codes(*part), low, high)
        undecided += int((low != high).logical_and(~low.isnan()).sum())
    size = shape.numel()
    faults = (
        (wrong, f"{wrong} of {size} codes differ from an independent cast of the result in float64"),
        (scales, "scales differ from those of an independent cast"),
        (
            undecided > max(MOST_OPEN * size, 2),
            f"{undecided} of {size} codes are undecided: too many results lie near a tie",
        ),
    )
    return "; ".join(text for fault, text in faults if fault)


def _outside(got: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements are not between two others; NaN is right where either is NaN."""
    inside = (got >= torch.minimum(one, other)) & (got <= torch.maximum(one, other))
    return int((~(inside | (got.isnan() & (one.isnan() | other.isnan())))).sum())
