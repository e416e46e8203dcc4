"""Backend "triton": fp8core's own FP8 matmul, `fp8core::matmul`.

For what `torch._scaled_mm` lacks or forbids: scales of 1x128 and 128x128 blocks, results of any dtype with rowwise
scales, sizes that are no multiple of 16, and a chosen accumulation. `use_fast_accum` chooses it: sums stay in
Hopper's FP8 units (about 14 bits) for all of K, or move to float32 every 128 elements (`PROMOTE_EVERY`). Blocks
move at every block whatever it says.

The rules are the kernel's own (`fp8core.kernels.matmul`): both operands contiguous along K, any size; where K is a
multiple of 16 bytes the tensor memory accelerator fetches them, else slower masked loads do. On a CPU the
operator's plain twin multiplies in float32, as `torch._scaled_mm` does there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8core.formats import as_element_format
from fp8core.gemm import layout
from fp8core.gemm.backend import Backend
from fp8core.kernels import ops
from fp8core.scaling import BLOCK

if TYPE_CHECKING:
    from fp8core.formats import Format

PROMOTE_EVERY = 128  # elements of K between two additions to the float32 sum, without fast accumulation
_NVIDIA = ("e4m3fn", "e5m2")


class Triton(Backend):
    """The operator `fp8core::matmul`."""

    name = "triton"

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        """A [M, K] row-major @ B [K, N] column-major with their scales: see `fp8core.gemm.scaled_mm`.

        Raises:
            ValueError: what `layout.layout_reason` says.
        """
        M = a.shape[0]
        # Of a matrix of one column, say, any strides will do
        if not (a.is_contiguous() and b.t().is_contiguous()) and (reason := layout.layout_reason(a, b)):
            raise ValueError(reason)
        # Squares on the left: the kernel takes a scale for each row of A.
        if scale_inv_a.dim() and scale_inv_a.shape[0] != M:
            scale_inv_a = scale_inv_a.repeat_interleave(BLOCK, 0)[:M]
        promote_every = 0 if use_fast_accum else PROMOTE_EVERY
        product: torch.Tensor = ops.matmul(a, b.t(), scale_inv_a, scale_inv_b.t(), out_dtype, promote_every)
        return product

    def shape_reason(
        self,
        M: int,
        K: int,
        N: int,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
        granularity: str = "tensorwise",
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> str | None:
        """The kernel refuses dtypes of the result, and no size."""
        if reason := layout.four_bit_reason(a_fmt, b_fmt):
            return reason
        for fmt in (a_fmt, b_fmt):
            as_element_format(fmt)
        if min(M, K, N) < 0:
            return f"M={M}, K={K}, N={N}: a matrix has no negative size"
        return layout.out_dtype_reason(out_dtype)

    def device_reason(
        self, device: torch.device | str, a_fmt: Format | torch.dtype | str, b_fmt: Format | torch.dtype | str
    ) -> str | None:
        """Why this device can't run the kernel with these formats; None if it can, or if it is a CPU."""
        if reason := layout.four_bit_reason(a_fmt, b_fmt):
            return reason
        formats = [as_element_format(fmt).name for fmt in (a_fmt, b_fmt)]
        if not set(formats) <= set(_NVIDIA):
            return f"backend 'triton' multiplies {' and '.join(_NVIDIA)}, not {' @ '.join(formats)}"
        if torch.version.hip is not None and torch.device(device).type == "cuda":
            return "backend 'triton' runs on NVIDIA GPUs, not on ROCm; use backend='torch'"
        return layout.device_reason(device, a_fmt, b_fmt)

    def granularity_reason(
        self, device: torch.device | str, granularity: str, nearest: str = ""
    ) -> str | None:
        """Why the kernel takes no scales of this granularity; None if it does."""
        if granularity not in ("1x32", "1x16", "16x16"):
            return None
        return f"backend 'triton' has no kernel for {granularity} scales; {layout.way_out(nearest)}"
