"""One scale for each row, and in the dual form for each column too.

A single direction needs one pass: a row is held on chip between its amax and its cast, up to `HELD` columns
(beyond, it is read a second time, mostly from cache). Two directions need the column maxima of the whole
matrix before the first code, so they take two passes: `amax.amax_rows_cols`, then this kernel, which encodes
each element once by its row's scale and once by its column's, and stores the second transposed.

Bytes an element (bfloat16): one direction 2 + 1; both 2 + 2 + 1 + 1; and 4 bytes for each amax and scale.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch, tuning
from fp8core.kernels.amax import amax_rows_cols
from fp8core.kernels.encode import encode, magnitude_bits, reciprocal, scale_of, widen
from fp8core.kernels.quads import encode_rows, encode_transposed, load_quads, quads_of, store_quads

TILES: tuple[tuning.Candidate, ...] = (  # the first is the default
    {"BLOCK_M": 128, "BLOCK_K": 64, "num_warps": 4},
    {"BLOCK_M": 128, "BLOCK_K": 128, "num_warps": 8},
)
HELD = 16384  # columns of one row that a program keeps in registers


@triton.jit
def _cast_rows_kernel(
    x_ptr,
    codes_ptr,
    scale_inv_ptr,
    M,
    K,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # the row fits into one block
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    row_at = rows.to(tl.int64)[:, None] * K
    in_m = rows[:, None] < M
    if ONE_BLOCK:
        keep = in_m & (columns[None, :] < K)
        x = tl.load(x_ptr + row_at + columns[None, :], mask=keep, other=0.0)
        scale = scale_of(tl.max(magnitude_bits(x), 1).to(tl.float32, bitcast=True), E5M2, POWER_OF_TWO)
        codes = encode(widen(x) * scale[:, None], E5M2, NATIVE)
        tl.store(codes_ptr + row_at + columns[None, :], codes, mask=keep)
    else:
        largest = tl.zeros((BLOCK_M,), tl.int32)
        for start in range(0, K, BLOCK_K):
            k = (start + columns)[None, :]
            x = tl.load(x_ptr + row_at + k, mask=in_m & (k < K), other=0.0)
            largest = tl.maximum(largest, tl.max(magnitude_bits(x), 1))
        scale = scale_of(largest.to(tl.float32, bitcast=True), E5M2, POWER_OF_TWO)
        for start in range(0, K, BLOCK_K):
            k = (start + columns)[None, :]
            x = tl.load(x_ptr + row_at + k, mask=in_m & (k < K), other=0.0)
            codes = encode(widen(x) * scale[:, None], E5M2, NATIVE)
            tl.store(codes_ptr + row_at + k, codes, mask=in_m & (k < K))
    tl.store(scale_inv_ptr + rows, reciprocal(scale, POWER_OF_TWO), mask=rows < M)


@triton.jit
def row_scales_of_quads(amax_ptr, q, M, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Scales of rows 4 q .. 4 q + 3: four blocks [Q]."""
    row = 4 * q
    return (
        scale_of(tl.load(amax_ptr + row, mask=row < M, other=0.0), E5M2, POWER_OF_TWO),
        scale_of(tl.load(amax_ptr + row + 1, mask=row + 1 < M, other=0.0), E5M2, POWER_OF_TWO),
        scale_of(tl.load(amax_ptr + row + 2, mask=row + 2 < M, other=0.0), E5M2, POWER_OF_TWO),
        scale_of(tl.load(amax_ptr + row + 3, mask=row + 3 < M, other=0.0), E5M2, POWER_OF_TWO),
    )


@triton.jit
def _cast_rows_cols_kernel(
    x_ptr,
    rows_amax_ptr,
    cols_amax_ptr,
    codes_ptr,
    codes_t_ptr,
    rows_scale_inv_ptr,
    cols_scale_inv_ptr,
    M,
    K,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # from the back, where the amax pass ended
    tile_m, tile_k = tile // tiles_k, tile % tiles_k
    q = quads_of(tile_m, BLOCK_M)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    x = [widen(rows) for rows in load_quads(x_ptr, q, k, M, K)]

    scales = row_scales_of_quads(rows_amax_ptr, q, M, E5M2, POWER_OF_TWO)
    store_quads(codes_ptr, encode_rows(x, scales, E5M2, NATIVE), q, k, M, K)
    col_scale = scale_of(tl.load(cols_amax_ptr + k, mask=k < K, other=0.0), E5M2, POWER_OF_TWO)
    scaled = [rows * col_scale[None, :] for rows in x]
    encode_transposed(codes_t_ptr, scaled, q, k, M, K, E5M2, WORDS, NATIVE)

    if tile_k == 0:
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        row_scale = scale_of(tl.load(rows_amax_ptr + m, mask=m < M, other=0.0), E5M2, POWER_OF_TWO)
        tl.store(rows_scale_inv_ptr + m, reciprocal(row_scale, POWER_OF_TWO), mask=m < M)
    if tile_m == 0:
        tl.store(cols_scale_inv_ptr + k, reciprocal(col_scale, POWER_OF_TWO), mask=k < K)


def cast_rowwise(
    x: torch.Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_rowwise`; x [M, K] row-major."""
    M, K = x.shape
    codes = torch.empty((M, K), dtype=dtype, device=x.device)
    scale_inv = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    block_k = min(launch.next_power_of_two(K), HELD)
    block_m = max(1, 8192 // block_k)
    launch.launch(
        _cast_rows_kernel,
        (launch.ceil_div(M, block_m),),
        x,
        codes.view(torch.uint8),
        scale_inv,
        M,
        K,
        device=x.device,
        num_warps=16 if block_k > 8192 else 8,
        E5M2=dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        NATIVE=launch.target_of(x.device).native_cast,
        ONE_BLOCK=block_k >= K,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
    )
    return codes, scale_inv


def cast_rowwise_both(
    x: torch.Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_rowwise_both`; x [M, K] row-major."""
    M, K = x.shape
    rows_amax, cols_amax = amax_rows_cols(x)
    codes, codes_t = launch.both_codes(x, dtype)
    scale_inv = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    scale_inv_t = torch.empty((K, 1), dtype=torch.float32, device=x.device)
    pointers = (
        x,
        rows_amax,
        cols_amax,
        codes.view(torch.uint8),
        codes_t.view(torch.uint8),
        scale_inv,
        scale_inv_t,
    )
    target = launch.target_of(x.device)

    def run(tile: tuning.Candidate) -> None:
        launch.launch(
            _cast_rows_cols_kernel,
            (launch.ceil_div(M, tile["BLOCK_M"]) * launch.ceil_div(K, tile["BLOCK_K"]),),
            *(*pointers, M, K),
            device=x.device,
            E5M2=dtype == torch.float8_e5m2,
            POWER_OF_TWO=power_of_two,
            NATIVE=target.native_cast,
            WORDS=M % 4 == 0,
            **tile,
        )

    run(tuning.choose("cast_rowwise_both", (M, K), x.dtype, target.name, TILES, run))
    return codes, scale_inv, codes_t, scale_inv_t
