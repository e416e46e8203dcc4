"""One scale for 1 x 128 elements (activations, gradients) or 128 x 128 (weights), as in DeepSeek-V3.

A tile of 128 x 128 holds whole groups of every kind, so one pass does everything: read, amax, scale, encode,
store, and the transposed copy with the scales of its own direction. No global amax: fewer bytes than
tensorwise scaling. The scales of 1 x 128 groups are stored one group column after the other, [M, groups] with
strides (1, M): 512 contiguous bytes for each tile, and the layout that cuBLAS takes (ATen `ScaledBlas.cpp`,
`ScalingType.BlockWise1x128`).

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2. Bytes an element (bfloat16): one layout 2 + 1, both
2 + 1 + 1, and 4 / 128 (1 x 128) or 4 / 16384 for each scale.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch, tuning
from fp8core.kernels.encode import encode, magnitude_bits, reciprocal, scale_of, widen
from fp8core.kernels.quads import (
    encode_rows,
    encode_transposed,
    largest_of,
    load_quads,
    quads_of,
    store_of_quads,
    store_quads,
    store_transposed,
)

BLOCK = 128
# Groups fix the tile. 1 x 128 both ways needs the registers of 8 warps to have a whole tile under way.
WARPS: dict[str, tuple[tuning.Candidate, ...]] = {
    "cast_1x128": ({"num_warps": 8}, {"num_warps": 4}),
    "cast_1x128_both": ({"num_warps": 8},),
    "cast_128x128_both": ({"num_warps": 4}, {"num_warps": 8}),
}


@triton.jit
def _cast_blocks_kernel(
    x_ptr,
    codes_ptr,
    codes_t_ptr,
    scale_inv_ptr,
    scale_inv_t_ptr,
    M,
    K,
    SQUARE: tl.constexpr,  # 128 x 128 groups instead of 1 x 128
    BOTH: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles_k = tl.cdiv(K, BLOCK)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    q = quads_of(tile_m, BLOCK)
    k = tile_k * BLOCK + tl.arange(0, BLOCK)
    x = load_quads(x_ptr, q, k, M, K)
    bits = [magnitude_bits(rows) for rows in x]

    if SQUARE:
        largest = tl.max(tl.max(largest_of(bits), 1), 0)
        scale = scale_of(largest.to(tl.float32, bitcast=True), E5M2, POWER_OF_TWO)
        codes = [encode(widen(rows) * scale, E5M2, NATIVE) for rows in x]
        store_quads(codes_ptr, codes, q, k, M, K)
        if BOTH:
            store_transposed(codes_t_ptr, codes, q, k, M, K, WORDS, NATIVE)
        tl.store(scale_inv_ptr + tile_m * tiles_k + tile_k, reciprocal(scale, POWER_OF_TWO))
    else:
        rows_amax = [tl.max(rows, 1).to(tl.float32, bitcast=True) for rows in bits]
        scales = [scale_of(amax, E5M2, POWER_OF_TWO) for amax in rows_amax]
        inverse = [reciprocal(scale, POWER_OF_TWO) for scale in scales]
        store_of_quads(scale_inv_ptr + tile_k.to(tl.int64) * M, inverse, q, M)
        if BOTH:  # first, since it holds a scale for each of a thread's columns
            columns_amax = tl.max(largest_of(bits), 0).to(tl.float32, bitcast=True)
            scale_t = scale_of(columns_amax, E5M2, POWER_OF_TWO)
            scaled = [widen(rows) * scale_t[None, :] for rows in x]
            encode_transposed(codes_t_ptr, scaled, q, k, M, K, E5M2, WORDS, NATIVE)
            inverse_t = reciprocal(scale_t, POWER_OF_TWO)
            tl.store(scale_inv_t_ptr + tile_m.to(tl.int64) * K + k, inverse_t, mask=k < K)
        wide = [widen(rows) for rows in x]
        store_quads(codes_ptr, encode_rows(wide, scales, E5M2, NATIVE), q, k, M, K)


def cast_1x128(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_1x128`; x [M, K] row-major."""
    codes, scale_inv, _, _ = _launch(x, dtype, power_of_two, square=False, both=False)
    return codes, scale_inv.t()


def cast_1x128_both(
    x: torch.Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_1x128_both`; x [M, K] row-major."""
    codes, scale_inv, codes_t, scale_inv_t = _launch(x, dtype, power_of_two, square=False, both=True)
    return codes, scale_inv.t(), codes_t, scale_inv_t.t()


def cast_128x128_both(
    x: torch.Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_128x128_both`; x [M, K] row-major."""
    codes, scale_inv, codes_t, _ = _launch(x, dtype, power_of_two, square=True, both=True)
    return codes, codes_t, scale_inv


def _launch(
    x: torch.Tensor, dtype: torch.dtype, power_of_two: bool, square: bool, both: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale_inv, codes_t, scale_inv_t), 1 x 128 scales as they lie: groups first."""
    M, K = x.shape
    groups_m, groups_k = launch.ceil_div(M, BLOCK), launch.ceil_div(K, BLOCK)
    codes = torch.empty((M, K), dtype=dtype, device=x.device)
    codes_t = torch.empty((K, M) if both else (0, 0), dtype=dtype, device=x.device)
    scale_inv = torch.empty(
        (groups_m, groups_k) if square else (groups_k, M), dtype=torch.float32, device=x.device
    )
    scale_inv_t = torch.empty(
        (groups_m, K) if both and not square else (0, 0), dtype=torch.float32, device=x.device
    )
    pointers = (x, codes.view(torch.uint8), codes_t.view(torch.uint8), scale_inv, scale_inv_t)
    target = launch.target_of(x.device)

    def run(candidate: tuning.Candidate) -> None:
        launch.launch(
            _cast_blocks_kernel,
            (groups_m * groups_k,),
            *(*pointers, M, K),
            device=x.device,
            SQUARE=square,
            BOTH=both,
            E5M2=dtype == torch.float8_e5m2,
            POWER_OF_TWO=power_of_two,
            NATIVE=target.native_cast,
            WORDS=M % 4 == 0,
            BLOCK=BLOCK,
            **candidate,
        )

    name = f"cast_{'128x128' if square else '1x128'}{'_both' if both else ''}"
    run(tuning.choose(name, (M, K), x.dtype, target.name, WARPS[name], run))
    return codes, scale_inv, codes_t, scale_inv_t
