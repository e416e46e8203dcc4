"""Backend `example_kernel`: where the call of your FP8 kernel goes; here torch's stands in, with one scale a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core.gemm import layout
from fp8core.gemm.backend import Backend
from fp8core.gemm.torch_mm import Torch

if TYPE_CHECKING:
    import torch

_STAND_IN = Torch()


class ExampleKernel(Backend):
    """Takes what torch takes, with tensorwise scales alone; each rule says what it refuses and why."""

    name = "example_kernel"

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        """A [M, K] row-major @ B [K, N] column-major, float32 scales [] that multiply the codes."""
        if scale_inv_a.dim():
            raise ValueError(
                f"example_kernel takes single scales, not {list(scale_inv_a.shape)}; take backend torch"
            )
        # Here goes the call of your kernel
        return _STAND_IN.matmul(a, b, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)

    shape_reason = staticmethod(layout.shape_reason)
    device_reason = staticmethod(layout.device_reason)

    def granularity_reason(
        self, device: torch.device | str, granularity: str, nearest: str = ""
    ) -> str | None:
        """Why it refuses these scales."""
        return (
            None
            if granularity == "tensorwise"
            else f"example_kernel takes tensorwise scales, not {granularity}"
        )


BACKEND = ExampleKernel()
