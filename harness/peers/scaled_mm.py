"""scaled_mm: `torch._scaled_mm` called bare, without a check. What our wrapper costs is the difference."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.peers.peer import Peer


def gemm(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, fast: bool) -> Tensor:
    """D [M, N] in bfloat16 of codes a [M, K] row-major and b [K, N] column-major."""
    return torch._scaled_mm(
        a, b, scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


PEER = Peer(
    arm="scaled_mm",
    doc="torch._scaled_mm called bare",
    recipes=("tensorwise", "rowwise"),
    gemm=gemm,
)
