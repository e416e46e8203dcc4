"""Backend: a scaled matmul, what it refuses, and its grouped kernel if it has one.

To add one, subclass `Backend` in a file of its own and add an instance to `fp8core.gemm.BACKENDS`; from outside the tree,
an entry point of the group `fp8_harness.backends`, or `fp8core.BACKENDS[name] = MyBackend()` in the running process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fp8core.formats import Format
    from fp8core.gemm.layout import Operand

# The arguments of `Backend.matmul`: a, b, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum
ProductArguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype, bool]


class Backend(ABC):
    """A scaled matmul and its rules; each rule answers in one sentence with a way out, or None, and runs nothing.

    Attributes:
        name: its key in `fp8core.gemm.BACKENDS`.
        is_fp8: it feeds FP8 to the matrix units; its operands must be lines that lie row-major, see `fp8core.gemm.layout.row_major`.
        bf16_only: granularities whose product it yields in bfloat16 alone. "reference_bf16" rounds where backend
            "torch" must, so that an emulated run can have the very codes of a real one; "reference" does not round,
            as torchao's emulation.
    """

    name: str
    is_fp8: bool = True
    bf16_only: frozenset[str] = frozenset()

    @abstractmethod
    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
        /,
    ) -> torch.Tensor:
        """A [M, K] @ B [K, N] with scales of one granularity; `scaled_mm` has checked that the operands fit each other, and asked
        `shape_reason` and `granularity_reason`, once for the same sizes, dtypes and device.

        Raises:
            ValueError: what it refuses beside that.
        """

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
        """Why it refuses these sizes, formats, scales or result on any device."""
        return None

    def device_reason(
        self, device: torch.device | str, a_fmt: Format | torch.dtype | str, b_fmt: Format | torch.dtype | str
    ) -> str | None:
        """Why it refuses this device for these formats."""
        return None

    def granularity_reason(
        self, device: torch.device | str, granularity: str, nearest: str = ""
    ) -> str | None:
        """Why it refuses these scales; names the recipe `nearest` as the way out. Queries no device."""
        return None

    def unsupported(
        self,
        M: int,
        K: int,
        N: int,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
        granularity: str = "tensorwise",
        out_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        nearest: str = "",
    ) -> str | None:
        """Why A [M, K] @ B [K, N] would not run: by all three rules.

        Args:
            M: rows of A, in elements.
            K: columns of A and rows of B, contracted over.
            N: columns of B.
            a_fmt: format of A, or its dtype or name.
            b_fmt: format of B.
            granularity: of the multiplication, see `fp8core.recipe.Gemm.granularity`.
            out_dtype: of the result.
            device: where it would run.
            nearest: the recipe to name as the way out.

        Raises:
            ValueError: a format that cannot hold tensor elements.
        """
        reason = self.shape_reason(M, K, N, a_fmt, b_fmt, granularity, out_dtype)
        reason = reason or self.device_reason(device, a_fmt, b_fmt)
        return reason or self.granularity_reason(device, granularity, nearest)

    def grouped_reason(
        self, device: torch.device, granularity: str, a_dtype: torch.dtype, b_dtype: torch.dtype
    ) -> str | None:
        """Why `grouped_matmul` would not run, so that `fp8core.gemm.grouped` multiplies group by group."""
        return f"backend {self.name!r} has no grouped kernel"

    def grouped_matmul(
        self, a: Operand, b: Operand, offsets: torch.Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> torch.Tensor:
        """All groups in one call: see `fp8core.gemm.grouped.scaled_grouped_mm`."""
        raise NotImplementedError(self.grouped_reason(a.qdata.device, "", a.qdata.dtype, b.qdata.dtype))
