"""aiter: AMD's kernel library, whose `gemm_a8w8` is the advised FP8 product with a scale a row on ROCm.

The other path of ROCm, hipBLASLt, is what `torch._scaled_mm` calls there: arms `scaled_mm_*`.

Signature (XQ [M, K], WQ [N, K], x_scale, w_scale, bias, dtype) read 2026-11-21 in ROCm/aiter, `aiter/ops/gemm_op_a8w8.py`;
name of the package in its `setup.py`.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress

import torch
from torch import Tensor

from harness.peers.peer import Peer, imported, needs

PIP = "git+https://github.com/ROCm/aiter.git"


def gemm(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, fast: bool) -> Tensor:
    """D [M, N] in bfloat16 of codes a [M, K] row-major and b [K, N] column-major; `fast` has no meaning on ROCm.

    Args:
        a: codes.
        b: codes.
        a_scale_inv: [M, 1].
        b_scale_inv: [1, N].
        fast: hardware of AMD has one accumulation.
    """
    product: Tensor = imported("aiter", PIP).gemm_a8w8(
        a, b.t(), a_scale_inv, b_scale_inv.t(), None, torch.bfloat16
    )
    return product


def version() -> str:
    """Version of the installed package, amd-aiter; aiter in earlier releases."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("amd-aiter")
    return importlib.metadata.version("aiter")


PEER = Peer(
    arm="aiter",
    doc="aiter.gemm_a8w8",
    missing=needs("aiter", PIP, "AMD"),
    version=version,
    recipes=("rowwise",),
    gemm=gemm,
)
