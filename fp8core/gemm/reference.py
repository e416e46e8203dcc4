"""Backend "reference": dequantise, then multiply in high precision. The oracle, and the emulation.

    D = ((codes_A @ codes_B) * scale_inv_A) * scale_inv_B

FP8 codes are exact in float32, and so is the product of two; scaling after the sum rounds less often than
scaling before it. The sum is formed in float64 if `out_dtype` is float64 and in float32 otherwise. Any shape,
layout, format pair and device is accepted.
"""

from __future__ import annotations

import torch


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """A [M, K] @ B [K, N] with their scales, both 0-dimensional or [M, 1] and [1, N].

    `use_fast_accum` has no meaning here: the sum is always formed in full precision.
    """
    compute = torch.float64 if out_dtype == torch.float64 else torch.float32
    product = torch.mm(a.to(compute), b.to(compute))
    return (product * scale_inv_a.to(compute) * scale_inv_b.to(compute)).to(out_dtype)
