"""Backend: what every scaled matmul of `fp8core.gemm.BACKENDS` offers, its product and the rules of what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fp8core.formats import Format


class Matmul(Protocol):
    """What a backend offers; operands are checked and scales have one granularity when it is called."""

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        """A [M, K] @ B [K, N] with their scales of one kind, see `scaled_mm`."""
        ...


class ShapeReason(Protocol):
    """Which sizes, formats, scales and results a backend refuses, on any device."""

    def __call__(
        self,
        M: int,
        K: int,
        N: int,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
        granularity: str = "tensorwise",
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> str | None:
        """One sentence with the value at fault, what is expected and a way out; or None."""
        ...


class DeviceReason(Protocol):
    """Which devices a backend refuses for these formats."""

    def __call__(
        self,
        device: torch.device | str,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
    ) -> str | None:
        """One sentence, or None."""
        ...


class GranularityReason(Protocol):
    """Which scales a backend refuses. Asked in each forward pass, so it queries no device."""

    def __call__(self, device: torch.device | str, granularity: str, nearest: str = "") -> str | None:
        """One sentence that names the recipe `nearest` as the way out, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """A scaled matmul and its rules.

    Attributes:
        matmul: the product.
        is_fp8: it feeds FP8 to the matrix units; its operands must lie as `fp8core.gemm.layout.arrange` lays them.
        shape_reason, device_reason, granularity_reason: why it would refuse, without allocating or running anything.
        bf16_only: granularities whose product it yields in bfloat16 alone. "reference_bf16" rounds where backend
            "torch" must, so that an emulated run can have the very codes of a real one; "reference" does not round,
            as torchao's emulation.
    """

    matmul: Matmul
    is_fp8: bool
    shape_reason: ShapeReason
    device_reason: DeviceReason
    granularity_reason: GranularityReason
    bf16_only: frozenset[str]

    def result_dtype(self, granularity: str, wanted: torch.dtype) -> torch.dtype:
        """The dtype in which this backend yields a product that is then converted to `wanted`."""
        return torch.bfloat16 if granularity in self.bf16_only else wanted
