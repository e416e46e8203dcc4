"""Grouped scaled matmul: one product for each expert, over rows that are sorted by expert.

    rows    D [T, N]     D[rows of e] = A [T, K][rows of e] @ B[e] [K, N]           output and grad_input
    groups  D [E, M, N]  D[e] = A [M, T][:, rows of e] @ B [T, N][rows of e]        grad_weight

The rows of group e are offsets[e-1] to offsets[e] - 1, from 0 for the first. Rows after the last offset are padding:
zero on the way in, zero on the way out. Two ways to compute it, one operator `fp8core::scaled_grouped_mm` around them
so that `torch.compile` meets no size that depends on data:

    one call   the backend's own, where its `grouped_reason` says nothing against it: no wait for the device
    a loop     `fp8core.gemm.scaled_mm` for each group that has rows, on any device and backend; reads the offsets
"""

from __future__ import annotations

import itertools

import torch
from torch.library import custom_op

from fp8core.gemm import backend_named, layout, scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.scaling import BLOCKS


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
    library = backend_named(backend)
    if library.grouped_reason(a.device, granularity, a.dtype, b.dtype) is None:
        return library.grouped_matmul(left, right, offsets, out_dtype, use_fast_accum)
    return _one_by_one(left, right, offsets, granularity, out_dtype, use_fast_accum, backend)


_operator.register_fake(
    lambda a, b, _a, _b, offsets, _granularity, out_dtype, *_: a.new_empty(
        layout.grouped_shape(a, b, offsets), dtype=out_dtype
    )
)


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Grouped product of operands in high precision; b is converted to a's dtype."""
    result: torch.Tensor = _operator_hp(a, b.to(a.dtype), offsets)
    return result


@custom_op("fp8core::grouped_mm", mutates_args=())
def _operator_hp(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm_hp`; bfloat16 on a GPU through PyTorch's own, which leaves rows of no group as they are."""
    by_rows = b.dim() == 3
    if a.is_cuda and a.dtype == torch.bfloat16 and 0 not in (*a.shape, *b.shape):
        return torch._grouped_mm(a, b, offs=layout.with_padding(offsets, a.shape[0 if by_rows else 1]))
    result = a.new_zeros(layout.grouped_shape(a, b, offsets))
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


_operator_hp.register_fake(lambda a, b, offsets: a.new_empty(layout.grouped_shape(a, b, offsets)))


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
    result = a.qdata.new_zeros(layout.grouped_shape(a.qdata, b.qdata, offsets), dtype=out_dtype)
    ends = check_offsets(offsets, a.qdata.shape[0 if by_rows else 1], exact=False)
    block = BLOCKS.get(granularity, 0)
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
            left = Operand(layout.row_major(left.qdata), left.scale_inv)
            right = Operand(layout.row_major(right.qdata.t()).t(), right.scale_inv)
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
