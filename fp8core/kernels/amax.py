"""Largest magnitudes: of a tensor, and of each row and column in one read.

Tensorwise, a fixed number of programs walks the tensor with 16-byte loads, each keeps an elementwise integer
maximum in registers, reduces it once and issues one atomic. Every order of the atomics gives the same bits.
Bytes an element (bfloat16): 2 read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import magnitude_bits
from fp8core.kernels.quads import largest_of


@triton.jit
def _amax_kernel(x_ptr, amax_bits_ptr, numel, BLOCK: tl.constexpr):
    PART: tl.constexpr = BLOCK // 4  # four loads under way, one maximum in registers
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, PART)
    largest = tl.zeros((PART,), tl.int32)
    for start in range(first, numel, step):
        left = numel - start
        x = (
            tl.load(x_ptr + start + offsets, mask=offsets < left, other=0.0),
            tl.load(x_ptr + start + PART + offsets, mask=PART + offsets < left, other=0.0),
            tl.load(x_ptr + start + 2 * PART + offsets, mask=2 * PART + offsets < left, other=0.0),
            tl.load(x_ptr + start + 3 * PART + offsets, mask=3 * PART + offsets < left, other=0.0),
        )
        largest = tl.maximum(largest, largest_of([magnitude_bits(part) for part in x]))
    tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _amax_rows_cols_kernel(
    x_ptr,
    rows_bits_ptr,
    cols_bits_ptr,
    M,
    K,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # BLOCK_M rows by SPAN columns; the maxima of the rest of a row or column meet these by atomics.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ptr = x_ptr + rows.to(tl.int64)[:, None] * K
    row_largest = tl.zeros((BLOCK_M,), tl.int32)
    for offset in range(0, SPAN, BLOCK_K):
        k = tl.program_id(1) * SPAN + offset + tl.arange(0, BLOCK_K)
        keep = (rows[:, None] < M) & (k[None, :] < K)
        bits = magnitude_bits(tl.load(row_ptr + k[None, :], mask=keep, other=0.0))
        row_largest = tl.maximum(row_largest, tl.max(bits, 1))
        tl.atomic_max(cols_bits_ptr + k, tl.max(bits, 0), mask=k < K, sem="relaxed")
    tl.atomic_max(rows_bits_ptr + rows, row_largest, mask=rows < M, sem="relaxed")


def amax(x: torch.Tensor) -> torch.Tensor:
    """Triton version of `reference.amax`; x contiguous, of any shape."""
    largest = launch.zero(x.device)
    block = 8192
    grid = launch.walking(launch.ceil_div(x.numel(), block))
    args = (x, largest.view(torch.int32), x.numel())
    launch.launch(_amax_kernel, grid, *args, device=x.device, num_warps=8, BLOCK=block)
    return largest


def amax_rows_cols(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.amax_rows_cols`; x [M, K] row-major."""
    M, K = x.shape
    rows = torch.zeros((M, 1), dtype=torch.float32, device=x.device)
    columns = torch.zeros((1, K), dtype=torch.float32, device=x.device)
    tile = {"SPAN": 1024, "BLOCK_M": 64, "BLOCK_K": 256}
    grid = (launch.ceil_div(M, tile["BLOCK_M"]), launch.ceil_div(K, tile["SPAN"]))
    args = (x, rows.view(torch.int32), columns.view(torch.int32), M, K)
    launch.launch(_amax_rows_cols_kernel, grid, *args, device=x.device, num_warps=8, **tile)
    return rows, columns
