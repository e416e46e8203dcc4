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
from fp8core.verify.oracle import CHUNK, rounded, tiles
from fp8core.verify.received import Operand, spread

if TYPE_CHECKING:
    from fp8core.producers import SwiGLU
    from fp8core.verify.oracle import Quantized

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
    matrices = [t.detach().reshape(-1, t.shape[-1]) for t in tensors]
    (M, K), dtype = matrices[0].shape, matrices[0].dtype
    near, far = (torch.empty_like(matrices[0], memory_format=torch.contiguous_format) for _ in "nf")
    step = max(1, CHUNK // max(K, 1))
    for first in range(0, M, step):
        rows = slice(first, first + step)
        wide = [t[rows].double() for t in matrices]
        if isinstance(module, RMSNorm):
            (x,) = wide
            mean = (
                x.square().sum(1, keepdim=True)
            ).float().double() / K  # float32: Inf where squares overflow
            y = x * torch.rsqrt(mean + module.eps) * module.weight.detach().double()
            error = y.abs() * (2.0**-24 * (16 + K**0.5))
        else:
            gate, up = wide
            y = gate * torch.sigmoid(gate) * up
            error = y.abs() * (2.0**-23 * (8 + gate.abs()))
        error = error + _TINY
        size = y.abs()
        near[rows] = torch.copysign((size - error).clamp(min=0), y).float().to(dtype)
        far[rows] = torch.copysign(size + error, y).float().to(dtype)
    return near, far


def produced_fault(operand: Operand, near: Quantized, far: Quantized) -> str:
    """How codes and scales differ from both casts of `result_bounds`, and from all between; "" if they don't."""
    cast = near.cast
    assert cast is not None
    if operand.codes.dtype != cast.format.dtype:
        return f"codes are {operand.codes.dtype}, the recipe promises {cast.format.dtype}"
    shape = operand.codes.shape
    if shape != near.x.shape:
        return f"codes have shape {list(shape)}, expected {list(near.x.shape)}"
    wrong = scales = undecided = 0
    for rows, columns in tiles(*shape):
        decoding = spread(operand.scale_inv, shape, rows, columns)
        ends = near.decoding(rows, columns), far.decoding(rows, columns)
        scales += _outside(decoding, *ends)
        if torch.equal(near.scale, far.scale):
            low, high = near.codes(rows, columns), far.codes(rows, columns)
        else:  # the scale is that of the result itself, which is known to within float32 only
            low, high = (
                rounded(q.hp(rows, columns) / decoding * factor, cast.format.dtype)
                for q, factor in ((near, 1 - _SCALE_ERROR), (far, 1 + _SCALE_ERROR))
            )
        wrong += _outside(operand.codes[rows, columns].float().double(), low, high)
        undecided += int((low != high).logical_and(~low.isnan()).sum())
    size = near.x.numel()
    faults = []
    if wrong:
        faults.append(f"{wrong} of {size} codes differ from an independent cast of the result in float64")
    if scales:
        faults.append(f"scales of {scales} of {size} elements differ from those of an independent cast")
    if undecided > max(MOST_OPEN * size, 2):
        faults.append(f"{undecided} of {size} codes are undecided: too many results lie near a tie")
    return "; ".join(faults)


def _outside(got: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements are not between two others; NaN is right where either is NaN."""
    inside = (got >= torch.minimum(one, other)) & (got <= torch.maximum(one, other))
    return int((~(inside | (got.isnan() & (one.isnan() | other.isnan())))).sum())
