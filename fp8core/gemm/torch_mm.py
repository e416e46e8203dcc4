"""Backend "torch": the hardware's FP8 matmul through `torch._scaled_mm` (cuBLASLt or CUTLASS on CUDA).

`torch._scaled_mm` rather than `torch.nn.functional.scaled_mm`, which has the same bits on a CPU (torch 2.13; no GPU has tried):
Inductor's async tensor parallelism joins the private one alone with its gathers (read in `torch/_inductor/fx_passes/
micro_pipeline_tp.py` of torch 2.13.0 and 2.14.1), and the public one has no CPU kernel in torch 2.11.

On CPU it converts and accumulates in float32 and ignores `use_fast_accum`. It refuses nothing there, so the rules of
`fp8core.gemm.layout` are checked first, on every device.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import torch

from fp8core.formats import E4M3FN
from fp8core.gemm import layout
from fp8core.gemm.backend import Backend

if TYPE_CHECKING:
    from fp8core.gemm.layout import Operand

GROUPED_CAPABILITY = (9, 0)


# On a CPU with AMX torch 2.13 multiplies by single scales through oneDNN, whose code for FP8 is its plain reference: 512
# cubed took 4,680 ms, torch's own loops 5.7 (one thread, 2026-11-23). It refuses fnuz and leaves K = 0 unwritten.
_HAS_AMX = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


class _WithoutOneDnn:
    """Within it torch multiplies with its own loops, by the same operators as on any other CPU, which are counted exactly.

    The switch belongs to the process, so threads share one of these: the first to enter turns it, the last to leave
    turns it back. `torch.backends.mkldnn.flags` would set TF32 too, and warn of it on a CPU.
    """

    def __init__(self) -> None:
        self._lock, self._within, self._enabled = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._enabled = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                torch._C._set_mkldnn_enabled(self._enabled)


_WITHOUT_ONEDNN = _WithoutOneDnn()


def _by_own_loops(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """A product of single scales on a CPU with AMX."""
    if not torch.compiler.is_compiling():
        with _WITHOUT_ONEDNN:
            return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
    # A graph holds no switch; scales of rows go to torch's own loops and give the same bits
    rows, columns = scale_a.repeat(a.shape[0])[:, None], scale_b.repeat(b.shape[1])[None]
    return torch._scaled_mm(a, b, scale_a=rows, scale_b=columns, out_dtype=out_dtype)


class Torch(Backend):
    """The libraries behind `torch._scaled_mm` and `torch._scaled_grouped_mm`."""

    name = "torch"
    bf16_only = frozenset({"rowwise", "1x128", "128x128", "1x32"})

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
        if reason := layout.layout_reason(a, b):
            raise ValueError(reason)
        if scale_inv_a.dim():
            # Strides of sizes of 1 too must be those of a contiguous tensor
            compiling = torch.compiler.is_compiling()
            if compiling or scale_inv_a.stride() != (1, 1):
                scale_inv_a = scale_inv_a.flatten()[:, None]
            if compiling or scale_inv_b.stride() != (b.shape[1], 1):
                scale_inv_b = scale_inv_b.flatten()[None]
        if _HAS_AMX and a.device.type == "cpu" and not scale_inv_a.dim():
            return _by_own_loops(a, b, scale_inv_a, scale_inv_b, out_dtype)
        return torch._scaled_mm(
            a,
            b,
            scale_a=scale_inv_a,
            scale_b=scale_inv_b,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )

    shape_reason = staticmethod(layout.shape_reason)
    device_reason = staticmethod(layout.device_reason)
    granularity_reason = staticmethod(layout.granularity_reason)

    def grouped_reason(
        self, device: torch.device, granularity: str, a_dtype: torch.dtype, b_dtype: torch.dtype
    ) -> str | None:
        """Why `torch._scaled_grouped_mm` does not multiply the groups; a single scale is repeated for each row, which is exact.

        Read in `_scaled_grouped_mm_cuda` and `check_scale` of ATen `native/cuda/GroupedBlas.cpp`, and its meta function
        (torch 2.13, 2026-11-21; on a GPU it could not be run): e4m3 by e4m3, one float32 scale a row of A and a column of
        B for each group, A row-major, B column-major, sizes and offsets multiples of 16, bfloat16 out; kernels of compute
        capability 9.0 alone (torch's own tests skip 10.0).
        """
        if not hasattr(torch, "_scaled_grouped_mm"):
            return f"torch {torch.__version__} has no _scaled_grouped_mm"
        if granularity not in ("tensorwise", "rowwise"):
            return f"the grouped kernel takes a scale for each row, not {granularity}"
        if (a_dtype, b_dtype) != (E4M3FN.dtype, E4M3FN.dtype):
            return f"the grouped kernel multiplies e4m3fn by e4m3fn, not {a_dtype} by {b_dtype}"
        if device.type != "cuda" or torch.version.hip is not None:
            return f"no FP8 grouped kernel on {'ROCm' if device.type == 'cuda' else device.type}"
        capability = torch.cuda.get_device_capability(device)
        if capability != GROUPED_CAPABILITY:
            return f"the FP8 grouped kernel is of compute capability 9.0, this is {capability[0]}.{capability[1]}"
        return None

    def grouped_matmul(
        self, a: Operand, b: Operand, offsets: torch.Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> torch.Tensor:
        """One call of `torch._scaled_grouped_mm`."""
        shape = layout.grouped_shape(a.qdata, b.qdata, offsets)
        if 0 in (*a.qdata.shape, *b.qdata.shape):
            return a.qdata.new_zeros(shape, dtype=out_dtype)
        left, right, scale_a, scale_b, ends = arguments_of_one_call(a, b, offsets)
        product = torch._scaled_grouped_mm(
            left, right, scale_a, scale_b, ends, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum
        )
        if b.qdata.dim() == 2:
            # torch's documentation doesn't say what a group without rows leaves in memory
            sizes = torch.diff(ends, prepend=ends.new_zeros(1))
            product = torch.where((sizes > 0)[:, None, None], product, 0)
        return product.to(out_dtype)


def arguments_of_one_call(
    a: Operand, b: Operand, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, scale_a, scale_b, offs) as `torch._scaled_grouped_mm` wants them.

    Rows of padding join the last group, since the kernel leaves rows of no group as they are in memory.
    """
    by_rows = b.qdata.dim() == 3
    groups = offsets.shape[0]
    a_codes = layout.row_major(a.qdata)
    b_codes = b.qdata
    if b_codes.stride(-2) != 1:
        b_codes = _copied(b_codes.transpose(-2, -1)).transpose(-2, -1)
    M, N = a_codes.shape[0], b_codes.shape[-1]
    if by_rows:
        scale_a = _copied(a.scale_inv.expand(M, 1)).view(M)
        per_group = b.scale_inv if b.scale_inv.dim() == 3 else b.scale_inv.unsqueeze(1).unsqueeze(2)
        scale_b = _copied(per_group.expand(groups, 1, N)).view(groups, N)
    else:
        scale_a = _copied(a.scale_inv.expand(groups, M, 1)).view(-1)
        scale_b = _copied(b.scale_inv.expand(groups, 1, N)).view(-1)
    rows = a_codes.shape[0 if by_rows else 1]
    return a_codes, b_codes, scale_a, scale_b, layout.with_padding(offsets, rows)


def _copied(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)
