"""What FP8 GEMMs really received: codes and scales at the operators, against independent casts.

The operators are those that multiply on every backend but "reference". A `TorchDispatchMode` sees them below autograd
and below every tensor subclass, with the tensors that the kernel gets, in forward and backward passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8core.arguments import PLAIN_TENSORS
from fp8core.verify.oracle import code_bytes, tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.verify.oracle import Quantized

_DIGEST_SEED = 0xF8


class Operand(NamedTuple):
    """Codes with their decoding scales, both [rows, columns] as the GEMM contracts them: columns of a, rows of b."""

    codes: torch.Tensor
    scale_inv: torch.Tensor


class Received(NamedTuple):
    """One call of an FP8 GEMM.

    Attributes:
        a, b: operands; of groups one of them has three dimensions, or scales for each group.
        offsets: of groups, else None.
    """

    a: Operand
    b: Operand
    offsets: torch.Tensor | None


def _of_scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *_: Any, **__: Any) -> Received:
    return Received(Operand(a, scale_a), Operand(b, scale_b), None)


def _of_matmul(a: Any, b_t: Any, scale_inv_a: Any, scale_inv_b: Any, *_: Any, **__: Any) -> Received:
    turned = scale_inv_b.t() if scale_inv_b.dim() == 2 else scale_inv_b
    return Received(Operand(a, scale_inv_a), Operand(b_t.t(), turned), None)


def _of_grouped(
    a: Any, b: Any, scale_inv_a: Any, scale_inv_b: Any, offsets: Any, *_: Any, **__: Any
) -> Received:
    return Received(Operand(a, scale_inv_a), Operand(b, scale_inv_b), offsets)


OPERATORS: dict[str, Callable[..., Received]] = {
    "aten::_scaled_mm": _of_scaled_mm,
    "fp8core::matmul": _of_matmul,
    "fp8core::scaled_grouped_mm": _of_grouped,
}


class Operators(TorchDispatchMode):
    """Hands each FP8 GEMM, and each write to a tensor, to whoever asked.

    Attributes:
        on_gemm: called with what a GEMM is about to receive.
        on_write: called with each tensor that an operator is about to write.
    """

    def __init__(self, on_gemm: Callable[[Received], None], on_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.on_gemm, self.on_write = on_gemm, on_write

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or `torch.compile` would fall back to eager mode while this looks."""
        return True

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return op(*args, **(kwargs or {}))  # DTensor asks for the shape of a result
        if any(kind not in PLAIN_TENSORS for kind in types):
            return NotImplemented  # a subclass first becomes what it does: modes come before subclasses
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            for argument, value in zip(op._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tree_leaves(value):
                        if isinstance(tensor, torch.Tensor):
                            self.on_write(tensor)
        make = OPERATORS.get(op.name().partition(".")[0])
        if make is not None:
            self.on_gemm(make(*args, **kwargs))
        return op(*args, **kwargs)


def spread(scale: torch.Tensor, shape: torch.Size, rows: slice, columns: slice) -> torch.Tensor:
    """A tile of decoding scales as float64, one an element, from what a GEMM got for codes of this shape."""
    block = 32 if scale.dtype == torch.float8_e8m0fnu else 128
    result = scale.float().double()
    if result.dim() == 0:
        return result.expand(rows.stop - rows.start, columns.stop - columns.start)
    for dim, along in enumerate((rows, columns)):
        size, count = shape[dim], result.shape[dim]
        index = torch.arange(along.start, along.stop, device=scale.device)
        index = index * 0 if count == 1 else index if count == size else index // block
        result = result.index_select(dim, index)
    return result


def cast_fault(operand: Operand, wanted: Quantized) -> str:
    """How codes and scales differ from an independent cast; "" if they don't. Padding beyond `wanted` is ignored."""
    cast = wanted.cast
    assert cast is not None
    if operand.codes.dtype != cast.format.dtype:
        return f"codes are {_short(operand.codes.dtype)}, the recipe promises {_short(cast.format.dtype)}"
    M, K = wanted.x.shape
    codes, shape = operand.codes[:M, :K], operand.codes.shape
    if codes.shape != wanted.x.shape:
        return f"codes have shape {list(shape)}, expected {[M, K]}"
    wrong = scales = 0
    first = ""
    for rows, columns in tiles(M, K):
        got = code_bytes(codes[rows, columns])
        want = code_bytes(wanted.codes(rows, columns).float().to(cast.format.dtype))
        differ = got != want
        wrong += int(differ.sum())
        if not first and wrong:
            i, j = differ.nonzero()[0].tolist()
            values = (float(codes[rows, columns][i, j]), float(wanted.codes(rows, columns)[i, j]))
            first = f", the first at [{rows.start + i}, {columns.start + j}]: {values[0]:g} for {values[1]:g}"
        decoding, expected = (
            spread(operand.scale_inv, shape, rows, columns),
            wanted.decoding(rows, columns),
        )
        scales += int(((decoding != expected) & ~(decoding.isnan() & expected.isnan())).sum())
    faults = []
    if wrong:
        faults.append(f"{wrong} of {M * K} codes differ from an independent cast{first}")
    if scales:
        faults.append(f"scales of {scales} of {M * K} elements differ from those of an independent cast")
    return "; ".join(faults)


class Digest(NamedTuple):
    """What is kept of an input's cast until its grad_weight GEMM: int64 sums by column, and the scales.

    Attributes:
        dtype: of the codes.
        shape: [M, K].
        columns: int64 [K], a sum of codes with random weights, modulo 2**64.
        scale_inv: float32, of each block.
        block: `Quantized.block`.
    """

    dtype: torch.dtype
    shape: torch.Size
    columns: torch.Tensor
    scale_inv: torch.Tensor
    block: tuple[int, int]

    @classmethod
    def of(cls, wanted: Quantized) -> Digest:
        """Digest a cast input."""
        assert wanted.cast is not None
        M, K = wanted.x.shape
        dtype = wanted.cast.format.dtype
        columns = torch.zeros(K, dtype=torch.int64, device=wanted.x.device)
        weights = position_weights(M, wanted.x.device)
        for rows, along in tiles(M, K):
            codes = code_bytes(wanted.codes(rows, along).float().to(dtype))
            columns[along] += (codes.long() * weights[rows, None]).sum(0)
        return cls(dtype, wanted.x.shape, columns, wanted.scale_inv.float(), wanted.block)

    def fault(self, operand: Operand) -> str:
        """How the codes that a GEMM received differ from the digest; "" if they don't."""
        if operand.codes.dtype != self.dtype:
            return f"codes are {_short(operand.codes.dtype)}, the recipe promises {_short(self.dtype)}"
        M, K = self.shape
        codes, shape = operand.codes[:M, :K], operand.codes.shape
        if codes.shape != self.shape:
            return f"codes have shape {list(shape)}, expected {[M, K]}"
        columns = torch.zeros_like(self.columns)
        weights = position_weights(M, codes.device)
        scales = 0
        for rows, along in tiles(M, K):
            columns[along] += (code_bytes(codes[rows, along]).long() * weights[rows, None]).sum(0)
            expected = self.scale_inv.double()
            for dim, part in enumerate((rows, along)):
                size = self.shape[dim]
                index = torch.arange(part.start, part.stop, device=codes.device)
                expected = expected.index_select(dim, index // (self.block[dim] or max(size, 1)))
            decoding = spread(operand.scale_inv, shape, rows, along)
            scales += int(((decoding != expected) & ~(decoding.isnan() & expected.isnan())).sum())
        wrong = int((columns != self.columns).sum())
        faults = []
        if wrong:
            faults.append(f"codes of {wrong} of {K} columns differ from an independent cast")
        if scales:
            faults.append(f"scales of {scales} of {M * K} elements differ from those of an independent cast")
        return "; ".join(faults)


def position_weights(size: int, device: torch.device) -> torch.Tensor:
    """Random weights of a checksum, int64 [size], the same in each call and on each rank."""
    generator = torch.Generator().manual_seed(_DIGEST_SEED)
    return torch.randint(1, 1 << 62, (size,), generator=generator).to(device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")
