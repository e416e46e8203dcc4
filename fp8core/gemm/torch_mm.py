"""Backend "torch": the hardware's FP8 matmul through `torch._scaled_mm` (cuBLASLt or CUTLASS on CUDA).

`torch._scaled_mm` rather than `torch.nn.functional.scaled_mm`, because the latter has no CPU kernel in torch
2.11. On CPU it converts and accumulates in float32 and ignores `use_fast_accum`. It refuses nothing there, so
the rules of `fp8core.gemm.layout` are checked first, on every device.
"""

from __future__ import annotations

import torch

from fp8core.gemm import layout


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """A [M, K] row-major @ B [K, N] column-major, scales both 0-dimensional or [M, 1] and [1, N].

    Raises:
        ValueError: what `layout.shape_reason` and `layout.layout_reason` say.
    """
    granularity = "rowwise" if scale_inv_a.dim() else "tensorwise"
    (M, K), N = a.shape, b.shape[1]
    reason = layout.shape_reason(M, K, N, a.dtype, b.dtype, granularity, out_dtype)
    reason = reason or layout.layout_reason(a, b)
    if reason is not None:
        raise ValueError(reason)
    return torch._scaled_mm(
        a, b, scale_a=scale_inv_a, scale_b=scale_inv_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
