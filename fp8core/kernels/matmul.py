"""Persistent scaled matmul: D [M, N] = A [M, K] @ B_T [N, K].T, FP8 in, float32 accumulation.

Both operands are contiguous along K, the only orientation of Hopper's FP8 units. One program for each
processor walks over the tiles of D; on sm_90 and newer the operands arrive by the tensor memory accelerator
(host-made descriptors), elsewhere by masked pointer loads.

    tensorwise   D = (A @ B) * scale_a * scale_b                            after the sum
    rowwise      D = (A @ B) * scale_a[m] * scale_b[n]                      after the sum
    blockwise    D = sum over blocks of 128 in K of (A @ B)_block * scale_a[m, block] * scale_b[n or n / 128, block]

*Accumulation.* Hopper's FP8 units keep about 14 bits of a running sum (DeepSeek-V3, arXiv 2412.19437, section
3.3.2). `promote_every` says after how many elements of K that sum is added to a float32 one: 0 leaves the whole K
in the unit ("fast accumulation"), 32, 64 or 128 bound the damage. It maps to Triton's `max_num_imprecise_acc`,
except that 0, which there means "no FP8 unit at all", here means what the hardware does by itself. Triton heeds
it on sm_90 only; for `mma.sync` (sm_89, sm_120) each block of K is multiplied into a fresh sum instead. Blockwise
promotes every 128 by construction. sm_100 sums in float32 and needs none.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch, tuning

PROMOTIONS: tuple[int, ...] = (0, 32, 64, 128)
GROUP = 128  # of K, and of N for 128 x 128 scales
TENSORWISE, ROWWISE, BLOCKWISE = (tl.constexpr(i) for i in range(3))

Tile = tuning.Candidate
_WIDE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3}
_SQUARE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4}
_SQUARE_4 = {**_SQUARE, "num_warps": 4}
_FLAT = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
_FLAT_8 = {**_FLAT, "num_warps": 8}
# The first is the default. None spills, which a test asserts: a sum beside a partial sum of 128 x 256 would, and so
# would a wide sum beside the scales of its columns that leaves as float32.
_TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": (_WIDE, _SQUARE, _SQUARE_4, _FLAT),
    "hopper rowwise to float32": (_SQUARE, _FLAT),
    "hopper promoting": (_SQUARE, _FLAT),
    "blackwell": (_WIDE, _SQUARE, _SQUARE_4),
    "blackwell rowwise to float32": (_SQUARE, _SQUARE_4),
    "blackwell promoting": ({**_SQUARE, "BLOCK_N": 64}, _FLAT_8),
    "mma.sync": ({**_SQUARE, "num_stages": 2}, _FLAT),  # at most 100 KiB of shared memory
    "mma.sync promoting": (_FLAT_8,),
}


@triton.jit
def _fp8_matmul_kernel(
    a,  # descriptor, or pointer where not TMA
    b_t,
    d_ptr,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    scale_a_stride_m,
    scale_a_stride_k,
    scale_b_stride_n,
    scale_b_stride_k,
    SCALING: tl.constexpr,
    ROWS_PER_SCALE_B: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr,
    PROMOTE_BY_SUM: tl.constexpr,
    TMA: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        # GROUP_M tiles below each other before the next column: their rows of A and B_T stay in cache.
        band = tile // (GROUP_M * tiles_n)
        rows_in_band = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        start_m = (band * GROUP_M + within % rows_in_band) * BLOCK_M
        start_n = (within // rows_in_band) * BLOCK_N
        m = start_m + tl.arange(0, BLOCK_M)
        n = start_n + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start_k in range(0, K, BLOCK_K):
            if TMA:
                x = a.load([start_m, start_k])
                y = b_t.load([start_n, start_k])
            else:
                k = start_k + tl.arange(0, BLOCK_K)
                x_at = a + m.to(tl.int64)[:, None] * K + k[None, :]
                x = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
                y_at = b_t + n.to(tl.int64)[:, None] * K + k[None, :]
                y = tl.load(y_at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
            if SCALING == BLOCKWISE:
                block = start_k // BLOCK_K
                scale_a_at = scale_a_ptr + m * scale_a_stride_m + block * scale_a_stride_k
                scale_a = tl.load(scale_a_at, mask=m < M, other=0.0)
                scale_b_at = scale_b_ptr + block * scale_b_stride_k
                if ROWS_PER_SCALE_B >= BLOCK_N:  # one for the whole tile
                    by_row = scale_a * tl.load(scale_b_at + (start_n // ROWS_PER_SCALE_B) * scale_b_stride_n)
                    total += tl.dot(x, y.T) * by_row[:, None]
                else:
                    scale_b_at += (n // ROWS_PER_SCALE_B) * scale_b_stride_n
                    scale_b = tl.load(scale_b_at, mask=n < N, other=0.0)
                    total += tl.dot(x, y.T) * scale_a[:, None] * scale_b[None, :]
            elif PROMOTE_EVERY == 0:
                total = tl.dot(x, y.T, total)
            elif PROMOTE_BY_SUM:
                # The explicit limit keeps the compiler from folding the sum back into the instruction.
                total += tl.dot(x, y.T, max_num_imprecise_acc=BLOCK_K)
            else:
                total = tl.dot(x, y.T, total, max_num_imprecise_acc=PROMOTE_EVERY)
        if SCALING == TENSORWISE:
            total = total * tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
        elif SCALING == ROWWISE:
            scale_a = tl.load(scale_a_ptr + m * scale_a_stride_m, mask=m < M, other=0.0)
            scale_b = tl.load(scale_b_ptr + n * scale_b_stride_n, mask=n < N, other=0.0)
            total = total * scale_a[:, None] * scale_b[None, :]
        d_at = d_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(d_at, total.to(d_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def matmul(
    a: torch.Tensor,
    b_t: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    promote_every: int,
) -> torch.Tensor:
    """Triton version of `reference.matmul`; a [M, K] and b_t [N, K] row-major FP8, K a multiple of 16 bytes for TMA.

    Raises:
        ValueError: unknown `promote_every`, scales of other shapes than the three kinds, or a GPU without FP8
            matrix units.
    """
    if promote_every not in PROMOTIONS:
        raise ValueError(
            f"promote_every is {promote_every}; expected one of {', '.join(map(str, PROMOTIONS))}: every how many "
            "elements of K the sum moves to float32 (0: never)"
        )
    (M, K), N = a.shape, b_t.shape[0]
    scaling, rows_per_scale_b = _scaling(M, N, K, scale_inv_a, scale_inv_b)
    target = launch.target_of(a.device)
    if 0 < target.capability < 89:
        raise ValueError(
            f"{target.name} has no FP8 matrix units (compute capability 8.9 or newer); "
            "multiply with backend='reference'"
        )
    d = torch.empty((M, N), dtype=out_dtype, device=a.device)
    tma = K % 16 == 0 and (target.capability >= 90 or launch.INTERPRETED)
    tma = tma and a.data_ptr() % 16 == 0 and b_t.data_ptr() % 16 == 0  # what a descriptor demands
    family = _family(target.capability)
    promotes = scaling is BLOCKWISE or (promote_every > 0 and family != "blackwell")
    kind = f"{family} promoting" if promotes else family
    if scaling is ROWWISE and out_dtype == torch.float32 and f"{kind} rowwise to float32" in _TILES:
        kind += " rowwise to float32"
    tiles = _TILES[kind]
    by_sum = promote_every > 0 and scaling is not BLOCKWISE and family == "mma.sync"
    if by_sum:
        tiles = tuple({**tile, "BLOCK_K": promote_every} for tile in tiles)

    def run(tile: Tile) -> None:
        programs = min(
            launch.ceil_div(M, tile["BLOCK_M"]) * launch.ceil_div(N, tile["BLOCK_N"]), target.processors
        )
        operands: tuple[Any, Any] = (a, b_t)
        if tma:
            operands = _descriptors(a, b_t, tile)
        launch.launch(
            _fp8_matmul_kernel,
            (programs,),
            *operands,
            *(d, scale_inv_a, scale_inv_b, M, N, K),
            *_strides(scale_inv_a),
            *_strides(scale_inv_b),
            device=a.device,
            fp_fusion=True,
            SCALING=scaling.value,
            ROWS_PER_SCALE_B=rows_per_scale_b,
            PROMOTE_EVERY=promote_every if promotes else 0,
            PROMOTE_BY_SUM=by_sum,
            TMA=tma,
            GROUP_M=8,
            **tile,
        )

    name = f"matmul_{scaling.value}_{promote_every}"
    run(tuning.choose(name, (M, N, K), a.dtype, target.name, tiles, run))
    return d


def _family(capability: int) -> str:
    """By matrix instruction: wgmma, tcgen05 or mma.sync. The interpreter plays Hopper."""
    if capability in (0, 90):
        return "hopper"
    return "blackwell" if 100 <= capability < 120 else "mma.sync"


def _descriptors(a: torch.Tensor, b_t: torch.Tensor, tile: Tile) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return (
        TensorDescriptor.from_tensor(a, [tile["BLOCK_M"], tile["BLOCK_K"]]),
        TensorDescriptor.from_tensor(b_t, [tile["BLOCK_N"], tile["BLOCK_K"]]),
    )


def _strides(scale_inv: torch.Tensor) -> tuple[int, int]:
    return (scale_inv.stride(0), scale_inv.stride(1)) if scale_inv.dim() else (0, 0)


def _scaling(
    M: int, N: int, K: int, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor
) -> tuple[tl.constexpr, int]:
    """(kind, rows of B_T that share a scale) from the scales' shapes."""
    a, b = tuple(scale_inv_a.shape), tuple(scale_inv_b.shape)
    blocks = launch.ceil_div(K, GROUP)
    if a == b == ():
        return TENSORWISE, 1
    if a == (M, 1) and b == (N, 1):
        return ROWWISE, 1
    if a == (M, blocks) and b == (N, blocks):
        return BLOCKWISE, 1
    if a == (M, blocks) and b == (launch.ceil_div(N, GROUP), blocks):
        return BLOCKWISE, GROUP
    raise ValueError(
        f"scales of shapes {list(a)} and {list(b)} fit no recipe for M={M}, N={N}, K={K}; expected both [], "
        f"or [{M}, 1] and [{N}, 1], or [{M}, {blocks}] and [{N}, {blocks}] or "
        f"[{launch.ceil_div(N, GROUP)}, {blocks}]"
    )
