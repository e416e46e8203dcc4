"""Gaussian operands whose products have a known SQNR."""

from __future__ import annotations

import torch


def operands(K: int, seed: int, M: int = 256, N: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian A [M, K] and column-major B [K, N] of bfloat16 values, B about 0.02 times N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(M, K, generator=generator)
    b = 0.02 * torch.randn(N, K, generator=generator)
    return a.bfloat16().float(), b.bfloat16().float().t()
