"""triton_tutorial: the FP8 product that a Triton beginner writes, as the tutorial "Matrix Multiplication" teaches it.

Tiles in groups of rows so that neighbours share what lies in L2, a loop over K with masked loads through pointers,
`tl.dot` into float32, sizes of the tiles by autotuning; and for FP8 the scales at the end. No tensor memory accelerator,
no warp specialisation, no promotion of the sums: what these are worth is the distance to the other arms.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.peers.peer import Peer, triton_missing

if TYPE_CHECKING:
    from collections.abc import Callable

# Rows, columns and depth of a tile, warps, stages: what the tutorial tries for FP8 on NVIDIA GPUs
TILES = (
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
    (256, 64, 128, 4, 4),
    (64, 256, 128, 4, 4),
    (128, 128, 128, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 32, 64, 4, 4),
)
FUSION = {"enable_fp_fusion": True}  # Triton 3.10 changes the default; nothing here is there to be fused
GROUP = 8  # rows of tiles that are computed together


@functools.cache
def kernel() -> tuple[Any, Any]:
    """The kernel with its autotuner, and bare; made when first asked for, since importing triton takes a while."""
    import triton

    from harness.peers.triton_tutorial_kernel import matmul

    configs = [
        triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k, "GROUP": GROUP}, num_warps=w, num_stages=s)
        for m, n, k, w, s in TILES
    ]
    return triton.autotune(configs, key=["M", "N", "K"])(matmul), matmul


def gemm(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, fast: bool) -> Tensor:
    """D [M, N] in bfloat16 of codes a [M, K] row-major and b [K, N] column-major; `fast` is what it always is."""
    return launch(kernel()[0], a, b, a_scale_inv, b_scale_inv)


def launch(
    function: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    **tile: int,
) -> Tensor:
    """Runs the kernel, with the tile given or, of an autotuned one, found.

    Args:
        function: of `kernel`.
        a: codes [M, K].
        b: codes [K, N].
        a_scale_inv: 0-dimensional, or [M, 1].
        b_scale_inv: 0-dimensional, or [1, N].
        out_dtype: of the result [M, N].
        tile: TILE_M, TILE_N, TILE_K and GROUP; none for an autotuned function.
    """
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=out_dtype, device=a.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (-(-M // meta["TILE_M"]) * -(-N // meta["TILE_N"]),)

    rowwise = a_scale_inv.dim() > 0
    strides = (a.stride(0), a.stride(1), b.stride(0), b.stride(1))
    function[grid](a, b, out, a_scale_inv, b_scale_inv, M, N, K, *strides, ROWWISE=rowwise, **FUSION, **tile)
    return out


def version() -> str:
    """Version of Triton, which compiles it."""
    return importlib.metadata.version("triton")


_GEMM: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor] = gemm
PEER = Peer(
    arm="tutorial",
    doc="Triton matmul of the tutorial's kind",
    missing=triton_missing,
    version=version,
    recipes=("tensorwise", "rowwise"),
    gemm=_GEMM,
    fast_accum=True,
)
