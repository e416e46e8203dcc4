"""RMSNorm that writes codes as they are and transposed by an earlier step's amax, and no high-precision result.

A program takes `BLOCK_M` whole rows, as quads (`quads`), in two walks over their columns: the first sums squares (and with
ADD stores sum = x + delta), the second reads the rows again, norms and encodes them, each element once. A column of a
block has `BLOCK_M` codes, so transposed codes leave in runs of 16 bytes; one row alone, as `norm` holds it, would store
them as single bytes.

The second walk finds the rows in the second-level cache: there are two programs a processor, and what all of them walk
over is 2 x processors x BLOCK_M x K x 2 bytes, 35 MB for K = 4096 on 132 processors with a cache of 50 MB. `traffic`
counts that read all the same. Bytes an element (bfloat16): 2 + 2 + 1 + 1, with ADD 2 + 2 + 2 + 2 + 1 + 1.

Holding the rows in registers instead (16 x 4096 in one program) needs no second walk but spills: 472 bytes a thread.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import leave_amax, narrow, tensor_scale, widen
from fp8core.kernels.quads import (
    largest_magnitude,
    load_quads,
    quads_of,
    store_both_ways,
    store_of_quads,
    store_quads,
)

TILE = {"BLOCK_M": 16, "BLOCK_K": 512, "num_warps": 8}
PROGRAMS_PER_PROCESSOR = (
    2  # as many as registers allow with every Triton; a third would only overflow the cache
)


@triton.jit
def _added(x, delta, NATIVE: tl.constexpr):
    """x + delta, rounded to their dtype."""
    return narrow(widen(x) + widen(delta), x.dtype, NATIVE)


@triton.jit
def _normed(x, rstd, weight, NATIVE: tl.constexpr):
    """A block [Q, C] by its rows' rstd [Q] and its columns' weights [C], rounded to its dtype."""
    return narrow(widen(x) * rstd[:, None] * weight[None, :], x.dtype, NATIVE)


@triton.jit
def _sum_of_squares(x):
    """Sum over each row of a block [Q, C], float32 [Q]."""
    wide = widen(x)
    return tl.sum(wide * wide, 1)


@triton.jit
def _rms_norm_cast_both_kernel(
    x_ptr,
    delta_ptr,  # with ADD
    sum_ptr,  # with ADD, else x
    weight_ptr,
    codes_ptr,
    codes_t_ptr,
    rstd_ptr,
    amax_ptr,
    scale_inv_bits_ptr,
    seen_bits_ptr,
    M,
    K,
    eps,
    ADD: tl.constexpr,
    FACTOR: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    scale = tensor_scale(amax_ptr, scale_inv_bits_ptr, FACTOR, True, E5M2, POWER_OF_TWO)
    largest = tl.zeros((BLOCK_M // 4,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        q = quads_of(tile, BLOCK_M)
        zeros = tl.zeros((BLOCK_M // 4,), tl.float32)
        squares = (zeros, zeros, zeros, zeros)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = load_quads(x_ptr, q, k, M, K)
            if ADD:
                delta = load_quads(delta_ptr, q, k, M, K)
                x = (
                    _added(x[0], delta[0], NATIVE),
                    _added(x[1], delta[1], NATIVE),
                    _added(x[2], delta[2], NATIVE),
                    _added(x[3], delta[3], NATIVE),
                )
                store_quads(sum_ptr, x, q, k, M, K)
            squares = (
                squares[0] + _sum_of_squares(x[0]),
                squares[1] + _sum_of_squares(x[1]),
                squares[2] + _sum_of_squares(x[2]),
                squares[3] + _sum_of_squares(x[3]),
            )
        rstd = [tl.rsqrt(of_row / K + eps) for of_row in squares]
        store_of_quads(rstd_ptr, rstd, q, M)
        if ADD:
            tl.debug_barrier()  # a thread may read what another one of this program has stored
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
            x = load_quads(sum_ptr, q, k, M, K)
            y = (
                _normed(x[0], rstd[0], weight, NATIVE),
                _normed(x[1], rstd[1], weight, NATIVE),
                _normed(x[2], rstd[2], weight, NATIVE),
                _normed(x[3], rstd[3], weight, NATIVE),
            )
            largest = tl.maximum(largest, tl.max(largest_magnitude(y), 1))
            store_both_ways(codes_ptr, codes_t_ptr, y, scale, q, k, M, K, E5M2, WORDS, NATIVE)
    leave_amax(tl.max(largest, 0), seen_bits_ptr, scale_inv_bits_ptr)


def rms_norm_cast_delayed_both(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.rms_norm_cast_delayed_both`; x [M, K] row-major."""
    return _cast_both(x, None, x, *given)


def add_rms_norm_cast_delayed_both(
    x: torch.Tensor, delta: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.add_rms_norm_cast_delayed_both`; x and delta [M, K] row-major."""
    total = torch.empty_like(x)
    return total, *_cast_both(x, delta, total, *given)


def _cast_both(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, ...]:
    M, K = x.shape
    codes = torch.empty((M, K), dtype=dtype, device=x.device)
    codes_t = torch.empty((K, M), dtype=dtype, device=x.device)
    rstd = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    scale_inv, seen = launch.zero(x.device), launch.zero(x.device)
    target = launch.target_of(x.device)
    launch.launch(
        _rms_norm_cast_both_kernel,
        (min(launch.ceil_div(M, TILE["BLOCK_M"]), target.processors * PROGRAMS_PER_PROCESSOR),),
        *(
            x,
            x if delta is None else delta,
            total,
            weight,
            codes.view(torch.uint8),
            codes_t.view(torch.uint8),
        ),
        *(rstd, amax, scale_inv.view(torch.int32), seen.view(torch.int32), M, K, eps),
        device=x.device,
        ADD=delta is not None,
        FACTOR=2.0**margin,
        E5M2=dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        NATIVE=target.native_cast,
        WORDS=M % 4 == 0,
        **TILE,
    )
    return codes, codes_t, rstd, scale_inv, seen
