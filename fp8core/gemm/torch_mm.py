"""Backend "torch": the hardware's FP8 matmul through `torch._scaled_mm` (cuBLASLt or CUTLASS on CUDA).

`torch._scaled_mm` rather than `torch.nn.functional.scaled_mm`, because the latter has no CPU kernel in torch
2.11. On CPU it converts and accumulates in float32 and ignores `use_fast_accum`. It refuses nothing there, so
the rules of `fp8core.gemm.layout` are checked first, on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.arguments import eager_cache
from fp8core.gemm import layout


class _Form(NamedTuple):
    """What operands of these shapes, strides and dtypes need: a reason to refuse them, or scales laid out anew."""

    reason: str | None
    flatten_a: bool
    flatten_b: bool


@eager_cache
def _form(
    a: torch.Size,
    b: torch.Size,
    scale_inv_a: torch.Size,
    scale_inv_b: torch.Size,
    a_stride: tuple[int, ...],
    b_stride: tuple[int, ...],
    scale_stride_a: tuple[int, ...],
    scale_stride_b: tuple[int, ...],
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
) -> _Form:
    """Apply the rules of shapes, scales and layout."""
    granularity = layout.granularity_of_shapes(a, b, scale_inv_a, scale_inv_b, scale_dtype)
    reason = layout.shape_reason(a[0], a[1], b[1], a_dtype, b_dtype, granularity, out_dtype)
    reason = reason or layout.granularity_reason(device, granularity)
    reason = reason or layout.strides_reason(a, a_stride, b, b_stride)
    # Strides of sizes of 1 too must be those of a contiguous tensor
    rows = granularity == "rowwise"
    compiling = torch.compiler.is_compiling()
    return _Form(
        reason,
        rows and (compiling or scale_stride_a != (1, 1)),
        rows and (compiling or scale_stride_b != (b[1], 1)),
    )


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
    reason, flatten_a, flatten_b = _form(
        a.shape,
        b.shape,
        scale_inv_a.shape,
        scale_inv_b.shape,
        a.stride(),
        b.stride(),
        scale_inv_a.stride(),
        scale_inv_b.stride(),
        a.dtype,
        b.dtype,
        scale_inv_a.dtype,
        out_dtype,
        a.device,
    )
    if reason is not None:
        raise ValueError(reason)
    if flatten_a:
        scale_inv_a = scale_inv_a.flatten()[:, None]
    if flatten_b:
        scale_inv_b = scale_inv_b.flatten()[None]
    return torch._scaled_mm(
        a, b, scale_a=scale_inv_a, scale_b=scale_inv_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
