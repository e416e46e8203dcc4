"""Backend "torch": the hardware's FP8 matmul through `torch._scaled_mm` (cuBLASLt or CUTLASS on CUDA).

`torch._scaled_mm` rather than `torch.nn.functional.scaled_mm`, because the latter has no CPU kernel in torch
2.11. On CPU it converts and accumulates in float32 and ignores `use_fast_accum`. It refuses nothing there, so
the rules of `fp8core.gemm.layout` are checked first, on every device.
"""

from __future__ import annotations

import torch

from fp8core.arguments import eager_cache
from fp8core.gemm import layout


@eager_cache
def _reason(
    a: torch.Size,
    b: torch.Size,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    granularity: str,
    out_dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """What the rules of shapes and of scales say."""
    reason = layout.shape_reason(a[0], a[1], b[1], a_dtype, b_dtype, granularity, out_dtype)
    return reason or layout.granularity_reason(device, granularity)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """A [M, K] row-major @ B [K, N] column-major with their scales: see `fp8core.gemm.scaled_mm`.

    Raises:
        ValueError: what `layout.shape_reason`, `granularity_reason` and `layout_reason` say.
    """
    granularity = layout.granularity_of(a, b, scale_inv_a, scale_inv_b)
    reason = _reason(a.shape, b.shape, a.dtype, b.dtype, granularity, out_dtype, a.device)
    reason = reason or layout.layout_reason(a, b)
    if reason is not None:
        raise ValueError(reason)
    if granularity == "rowwise":  # strides of sizes of 1 too must be those of a contiguous tensor
        compiling = torch.compiler.is_compiling()
        if compiling or scale_inv_a.stride() != (1, 1):
            scale_inv_a = scale_inv_a.flatten()[:, None]
        if compiling or scale_inv_b.stride() != (b.shape[1], 1):
            scale_inv_b = scale_inv_b.flatten()[None]
    return torch._scaled_mm(
        a, b, scale_a=scale_inv_a, scale_b=scale_inv_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
