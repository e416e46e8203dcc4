"""deepgemm: DeepSeek's GEMM of blocks, compiled when it is first called (which needs nvcc on the machine).

D = A @ B.T with scales of 1x128 of A and 128x128 of B, moved to float32 every 128 elements: the recipe `blockwise`. The
weight gradient, with 1x128 on both sides, is another kernel of another layout and is left out. Scales on Hopper are
float32; on Blackwell the library packs them itself.

Interface of 2025-07-20 and later (`fp8_gemm_nt`), before that `gemm_fp8_fp8_bf16_nt`; README read 2026-11-21.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from harness.peers.peer import Peer, imported, needs

PIP = "git+https://github.com/deepseek-ai/DeepGEMM.git"


def gemm(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, fast: bool) -> Tensor:
    """D [M, N] in bfloat16 of codes a [M, K] row-major and b [K, N] column-major; `fast` has no meaning to it.

    Args:
        a: codes.
        b: codes.
        a_scale_inv: [M, K / 128], rows next to each other.
        b_scale_inv: [K / 128, N / 128], those along K next to each other.
        fast: it always moves its sums to float32.
    """
    library = imported("deep_gemm", PIP)
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    multiply = getattr(library, "fp8_gemm_nt", None) or library.gemm_fp8_fp8_bf16_nt
    multiply((a, a_scale_inv), (b.t(), b_scale_inv.t()), out)
    return out


def version() -> str:
    """Version of the installed package."""
    return importlib.metadata.version("deep_gemm")


PEER = Peer(
    arm="deepgemm",
    doc="deep_gemm.fp8_gemm_nt",
    missing=needs("deep_gemm", PIP, "NVIDIA", 9, 10),
    version=version,
    recipes=("blockwise",),
    gemm=gemm,
    granularities=(("1x128", "128x128"),),
)
