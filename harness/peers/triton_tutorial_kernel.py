"""The kernel of `harness.peers.triton_tutorial`, apart from it because it imports triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    a_row,
    a_column,
    b_row,
    b_column,
    ROWWISE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of D [M, N] = A [M, K] @ B [K, N] times scale_inv of both; strides in elements, D row-major."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    # GROUP rows of tiles, column by column: what they read stays in L2 for the next ones.
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    rows_here = min(tiles_m - first, GROUP)
    m = (first + tile % (GROUP * tiles_n) % rows_here) * TILE_M + tl.arange(0, TILE_M)
    n = (tile % (GROUP * tiles_n) // rows_here) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    a = a_ptr + (m % M)[:, None] * a_row + k[None, :] * a_column
    b = b_ptr + k[:, None] * b_row + (n % N)[None, :] * b_column
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, TILE_K)):
        left = K - step * TILE_K
        # The mask's other value is the code 0: FP8 has no literal of its own.
        a_tile = tl.load(a, mask=k[None, :] < left, other=0.0)
        b_tile = tl.load(b, mask=k[:, None] < left, other=0.0)
        total = tl.dot(a_tile, b_tile, total)
        a += TILE_K * a_column
        b += TILE_K * b_row
    if ROWWISE:
        a_scale = tl.load(a_scale_ptr + m, mask=m < M, other=0.0)[:, None]
        b_scale = tl.load(b_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    else:
        a_scale = tl.load(a_scale_ptr)
        b_scale = tl.load(b_scale_ptr)
    result = (total * a_scale * b_scale).to(out_ptr.dtype.element_ty)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + m[:, None] * N + n[None, :], result, mask=inside)
