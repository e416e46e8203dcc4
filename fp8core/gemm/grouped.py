"""Grouped scaled matmul: one product for each expert, over rows that are sorted by expert.

    rows    D [T, N]     D[rows of e] = A [T, K][rows of e] @ B[e] [K, N]           output and grad_input
    groups  D [E, M, N]  D[e] = A [M, T][:, rows of e] @ B [T, N][rows of e]        grad_weight

The rows of group e are offsets[e-1] to offsets[e] - 1, from 0 for the first. Rows after the last offset are padding:
zero on the way in, zero on the way out. Two ways to compute it, one operator `fp8core::scaled_grouped_mm` around them
so that `torch.compile` meets no size that depends on data:

    one call   `torch._scaled_grouped_mm`, where `one_call_reason` says nothing against it: no wait for the device
    a loop     `fp8core.gemm.scaled_mm` for each group that has rows, on any device and backend; reads the offsets

Backend "fastest" takes the one call where backend "torch" does, unmeasured, and chooses for each group in the loop.

What the one call takes (`_scaled_grouped_mm_cuda` and `check_scale` in ATen `native/cuda/GroupedBlas.cpp`, and its
meta function, read in torch 2.13 on 2026-11-21; on a GPU it could not be run): e4m3 by e4m3, one float32 scale a
row of A and a column of B for each group, A row-major, B column-major, sizes and offsets multiples of 16, bfloat16
out; kernels of compute capability 9.0 alone (torch's own tests skip 10.0).
"""

from __future__ import annotations

import itertools

import torch
from torch.library import custom_op

from fp8core.formats import E4M3FN
from fp8core.gemm import backend_named, layout, scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.scaling import BLOCK, MX_BLOCK

ONE_CALL_CAPABILITY = (9, 0)
ONE_CALL_BACKENDS = ("torch", "fastest")
ONE_CALL_GRANULARITIES = ("tensorwise", "rowwise")


def check_offsets(offsets: torch.Tensor, rows: int, *, exact: bool = True, multiple: int = 1) -> list[int]:
    """Reads offsets [E] and refuses those that cut no rows [T] into groups; waits for the device.

    Args:
        offsets: int32 [E].
        rows: T.
        exact: the last must be T; else rows after it are padding.
        multiple: that each must be a multiple of.

    Returns:
        The offsets, as numbers.

    Raises:
        ValueError: negative, decreasing, beyond the rows, or no multiple.
    """
    ends: list[int] = offsets.tolist()
    for number, (before, end) in enumerate(itertools.pairwise([0, *ends])):
        if end < before:
            raise ValueError(
                f"offsets[{number}] = {end} lies before {before}; expected a rising sequence from 0"
            )
        if end % multiple:
            raise ValueError(
                f"offsets[{number}] = {end} is not a multiple of {multiple}, which this recipe's GEMMs need; pad the "
                "groups by fp8core.pad_groups"
            )
    last = ends[-1] if ends else 0
    if last > rows or (exact and last != rows):
        raise ValueError(
            f"offsets end at {last}, but there are {rows} rows; the last offset must be that number"
        )
    return ends


def one_call_reason(
    device: torch.device, backend: str, granularity: str, a_dtype: torch.dtype, b_dtype: torch.dtype
) -> str | None:
    """Why the groups are multiplied one by one; None where one call of `torch._scaled_grouped_mm` does it.

    Args:
        device: where they lie.
        backend: a key of `fp8core.gemm.BACKENDS`.
        granularity: of the multiplication; a single scale is repeated for each row, which is exact.
        a_dtype: of A's codes.
        b_dtype: of B's.
    """
    if backend not in ONE_CALL_BACKENDS:
        return f"backend {backend!r} has no grouped kernel"
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"torch {torch.__version__} has no _scaled_grouped_mm"
    if granularity not in ONE_CALL_GRANULARITIES:
        return f"the grouped kernel takes a scale for each row, not {granularity}"
    if (a_dtype, b_dtype) != (E4M3FN.dtype, E4M3FN.dtype):
        return f"the grouped kernel multiplies e4m3fn by e4m3fn, not {a_dtype} by {b_dtype}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no FP8 grouped kernel on {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != ONE_CALL_CAPABILITY:
        return f"the FP8 grouped kernel is of compute capability 9.0, this is {capability[0]}.{capability[1]}"
    return None


def scaled_grouped_mm(
    a: Operand,
    b: Operand,
    offsets: torch.Tensor,
    granularity: str,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    backend: str = "torch",
) -> torch.Tensor:
    """See the module docstring.

    Args:
        a: codes [T, K], or [M, T] for `groups`; its scales as the table says.
        b: codes [E, K, N], or [T, N] for `groups`.
        offsets: int32 [E]; each a multiple of 16, of 128 for blocks along the rows.
        granularity: of the multiplication, the finer of the two operands'.
        out_dtype: of the result.
        use_fast_accum: as `fp8core.gemm.scaled_mm`.
        backend: a key of `fp8core.gemm.BACKENDS`.

                      rows: scale_inv of a, of b              groups: scale_inv of a, of b
        tensorwise    [], [E]                                 [], []
        rowwise       [T, 1], [E, 1, N]                       [E, M, 1], [E, 1, N]
        1x128         [T, K/128], [E, K/128, N]               [M, T/128], [T/128, N]
        128x128       [T/128, K/128], [E, K/128, N/128]       [M/128, T/128], [T/128, N/128]
        1x32, e8m0    [T, K/32], [E, K/32, N]                 [M, T/32], [T/32, N]

    Returns:
        [T, N] or [E, M, N] in out_dtype; zeros for a group without rows.
    """
    result: torch.Tensor = _operator(
        a.qdata, b.qdata, a.scale_inv, b.scale_inv, offsets, granularity, out_dtype, use_fast_accum, backend
    )
    return result


@custom_op("fp8core::scaled_grouped_mm", mutates_args=())
def _operator(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    offsets: torch.Tensor,
    granularity: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    """`scaled_grouped_mm` of plain tensors."""
    left, right = Operand(a, scale_inv_a), Operand(b, scale_inv_b)
    if one_call_reason(a.device, backend, granularity, a.dtype, b.dtype) is None:
        return _in_one_call(left, right, offsets, out_dtype, use_fast_accum)
    return _one_by_one(left, right, offsets, granularity, out_dtype, use_fast_accum, backend)


@_operator.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    offsets: torch.Tensor,
    granularity: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    return a.new_empty(_result_shape(a, b, offsets), dtype=out_dtype)


def _result_shape(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> tuple[int, ...]:
    if b.dim() == 3:
        return a.shape[0], b.shape[2]
    return offsets.shape[0], a.shape[0], b.shape[1]


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same product of operands in high precision; b is converted to a's dtype."""
    result: torch.Tensor = _operator_hp(a, b.to(a.dtype), offsets)
    return result


@custom_op("fp8core::grouped_mm", mutates_args=())
def _operator_hp(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm_hp`; bfloat16 on a GPU through PyTorch's own, which leaves rows of no group as they are."""
    by_rows = b.dim() == 3
    if a.is_cuda and a.dtype == torch.bfloat16 and 0 not in (*a.shape, *b.shape):
        return torch._grouped_mm(a, b, offs=_up_to(offsets, a.shape[0 if by_rows else 1]))
    result = a.new_zeros(_result_shape(a, b, offsets))
    ends = check_offsets(offsets, a.shape[0 if by_rows else 1], exact=False)
    for group, (first, end) in enumerate(itertools.pairwise([0, *ends])):
        if first == end:
            continue
        rows = slice(first, end)
        if by_rows:
            result[rows] = a[rows] @ b[group]
        else:
            result[group] = a[:, rows] @ b[rows]
    return result


@_operator_hp.register_fake
def _(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return a.new_empty(_result_shape(a, b, offsets))


def _copied(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _up_to(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The offsets with the rows of padding in the last group; without a wait for the device."""
    count = offsets.shape[0] - 1
    return torch.cat((offsets.narrow(0, 0, count), torch.full_like(offsets.narrow(0, count, 1), rows)))


def arguments_of_one_call(
    a: Operand, b: Operand, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, scale_a, scale_b, offs) as `torch._scaled_grouped_mm` wants them.

    Rows of padding join the last group, since the kernel leaves rows of no group as they are in memory.
    """
    by_rows = b.qdata.dim() == 3
    groups = offsets.shape[0]
    a_codes = a.qdata if layout.is_row_major(a.qdata) else _copied(a.qdata)
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
    return a_codes, b_codes, scale_a, scale_b, _up_to(offsets, rows)


def _in_one_call(
    a: Operand, b: Operand, offsets: torch.Tensor, out_dtype: torch.dtype, use_fast_accum: bool
) -> torch.Tensor:
    shape = _result_shape(a.qdata, b.qdata, offsets)
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


def _one_by_one(
    a: Operand,
    b: Operand,
    offsets: torch.Tensor,
    granularity: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    backend: str,
) -> torch.Tensor:
    by_rows = b.qdata.dim() == 3
    result = a.qdata.new_zeros(_result_shape(a.qdata, b.qdata, offsets), dtype=out_dtype)
    ends = check_offsets(offsets, a.qdata.shape[0 if by_rows else 1], exact=False)
    block = {"1x128": BLOCK, "128x128": BLOCK, "1x32": MX_BLOCK}.get(granularity, 0)
    for group, (first, end) in enumerate(itertools.pairwise([0, *ends])):
        if first == end:
            continue
        rows = slice(first, end)
        if by_rows:
            left = Operand(a.qdata[rows], _lines(a.scale_inv, rows, a.qdata.shape[0], block, 0))
            right = Operand(b.qdata[group], b.scale_inv[group])
        else:
            left = Operand(a.qdata[:, rows], _of_group(a.scale_inv, group, rows, block, 1))
            right = Operand(b.qdata[rows], _of_group(b.scale_inv, group, rows, block, 0))
        if backend_named(backend).is_fp8:
            left, right = layout.arrange(left, right)
        product = scaled_mm(left, right, out_dtype, use_fast_accum, backend)
        result[rows if by_rows else group] = product
    return result


def _lines(scale_inv: torch.Tensor, rows: slice, total: int, block: int, dim: int) -> torch.Tensor:
    """The scales of these rows: one for all, one for each, or one for each block of them."""
    if scale_inv.dim() == 0 or (dim == 0 and scale_inv.shape[0] == total):
        return scale_inv if scale_inv.dim() == 0 else scale_inv[rows]
    length = -(-(rows.stop - rows.start) // block)
    return scale_inv.narrow(dim, rows.start // block, length)


def _of_group(scale_inv: torch.Tensor, group: int, rows: slice, block: int, dim: int) -> torch.Tensor:
    """The scales of a group's rows where these are contracted: one for all, one a line, or blocks along `dim`."""
    if scale_inv.dim() == 3:
        return scale_inv[group]
    return _lines(scale_inv, rows, -1, block, dim)
