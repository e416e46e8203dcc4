"""Float8Tensor: FP8 codes and their scale in one tensor that autograd sees in high precision.

    value = qdata * scale_inv

A wrapper subclass. It *advertises* the high-precision dtype of the tensor that it stands for, so that
autograd accepts it wherever that tensor would go; it *holds* one byte for each element. Only operations that
move whole elements and scales are defined on it. Every other operation raises and names the way out
(`.dequantize()`, `fp8core.scaled_mm`), because a silent conversion back hides that a layer does not run in
FP8, and because PyTorch's own kernels on FP8 dtypes round each result to FP8.

Tensorwise, `scale_inv` is 0-dimensional. Otherwise it has the rank of `qdata`: rowwise with the scaled dimension
reduced to 1, blockwise to the number of blocks, so that every re-arrangement of the codes has its counterpart
for the scale. MX scales are stored as E8M0 codes, one byte for 32 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fp8core import cast
from fp8core.formats import E8M0FNU, Format, as_element_format
from fp8core.scaling import BLOCK, HP_DTYPES, MX_BLOCK

if TYPE_CHECKING:
    from fp8core.scaling import Granularity, MxMode

aten = torch.ops.aten

Handler = Callable[..., Any]
_HANDLERS: dict[Any, Handler] = {}  # ATen operator -> what it means for a Float8Tensor


class Float8Tensor(torch.Tensor):
    """FP8 codes with their decoding scale.

    Attributes:
        qdata: the codes; FP8 dtype, any shape and strides.
        scale_inv: float32; `qdata * scale_inv` is the value. 0-dimensional, or of qdata's rank, each size
            equal to qdata's, 1, or the number of blocks of 128. float8_e8m0fnu for blocks of 32.
        granularity: how many elements share a scale.
        dtype: the advertised high-precision dtype, that of `dequantize()`.
    """

    qdata: torch.Tensor
    scale_inv: torch.Tensor
    granularity: Granularity
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(
        cls: type,
        qdata: torch.Tensor,
        scale_inv: torch.Tensor,
        hp_dtype: torch.dtype,
        granularity: Granularity | None = None,
    ) -> Float8Tensor:
        """Wraps codes and scale without copying them; granularity None: tensorwise or rowwise, as the scale says.

        Raises:
            ValueError: qdata is no FP8 tensor, or scale_inv doesn't fit it and the granularity.
            TypeError: scale_inv is not float32 (float8_e8m0fnu for "1x32"), or hp_dtype is none of float32,
                bfloat16, float16.
        """
        as_element_format(qdata.dtype)
        granularity = granularity or ("rowwise" if scale_inv.dim() else "tensorwise")
        scale_dtype = E8M0FNU.dtype if granularity == "1x32" else torch.float32
        if scale_inv.dtype != scale_dtype:
            raise TypeError(
                f"scale_inv has dtype {scale_inv.dtype}; expected {str(scale_dtype).removeprefix('torch.')}"
            )
        if hp_dtype not in HP_DTYPES:
            raise TypeError(f"hp_dtype {hp_dtype} is not offered; expected float32, bfloat16 or float16")
        if not _fits(scale_inv.shape, qdata.shape, granularity):
            raise ValueError(
                f"scale_inv of shape {list(scale_inv.shape)} does not fit codes of shape {list(qdata.shape)} "
                f"scaled {granularity}; expected [] or the same rank, each size equal, 1 or the number of blocks"
            )
        return Float8Tensor.of_cast(qdata, scale_inv, hp_dtype, granularity)

    @staticmethod
    def of_cast(
        qdata: torch.Tensor, scale_inv: torch.Tensor, hp_dtype: torch.dtype, granularity: Granularity
    ) -> Float8Tensor:
        """The constructor without its checks, for codes and scales that a cast of fp8core has just made."""
        self: Float8Tensor = torch.Tensor._make_wrapper_subclass(
            Float8Tensor,
            qdata.shape,
            strides=qdata.stride(),
            storage_offset=qdata.storage_offset(),
            dtype=hp_dtype,
            device=qdata.device,
        )
        self.qdata = qdata
        self.scale_inv = scale_inv
        self.granularity = granularity
        return self

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return as_element_format(self.qdata.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`qdata * scale_inv` as a plain tensor of the advertised dtype, or of the given one (float64: exact)."""
        return cast.dequantize(self.qdata, self.scale_inv, dtype or self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, Granularity]]:
        return ["qdata", "scale_inv"], (self.dtype, self.granularity)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor],
        meta: tuple[torch.dtype, Granularity],
        outer_size: Any,
        outer_stride: Any,
    ) -> Float8Tensor:
        return Float8Tensor(parts["qdata"], parts["scale_inv"], *meta)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents to print
        return (
            f"Float8Tensor(shape={list(self.shape)}, {self.format.name}, {self.granularity}, "
            f"hp={str(self.dtype).removeprefix('torch.')}, device={self.device})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operator
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(op)
        if handler is None:
            composed = decomposed(op, args, kwargs)
            if composed is not NotImplemented:
                return composed
            known = ", ".join(sorted({str(o.overloadpacket).removeprefix("aten.") for o in _HANDLERS}))
            raise NotImplementedError(
                f"Float8Tensor has no {op}; call .dequantize() first, or fp8core.scaled_mm(a, b) to multiply. "
                f"It knows {known}"
            )
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            # A view of a weight that FSDP gathered in training must not be an inference tensor, or autograd refuses it
            with torch.inference_mode(False):
                return handler(op, *args, **(kwargs or {}))
        return handler(op, *args, **(kwargs or {}))


def quantize(
    x: torch.Tensor,
    dtype: Format | torch.dtype | str,
    granularity: Granularity = "tensorwise",
    *,
    dim: int = -1,
    power_of_two: bool = False,
    mx_mode: MxMode = "rceil",
) -> Float8Tensor:
    """Scales x into the range of an FP8 format and rounds it; detached from autograd.

    >>> import torch
    >>> q = quantize(torch.tensor([[1.0, -2.0], [0.0, 0.25]]), torch.float8_e4m3fn, "rowwise")
    >>> q.qdata.float().tolist()  # the largest magnitude of each row becomes 448, by scales 224 and 1792
    [[224.0, -448.0], [0.0, 448.0]]
    >>> (q.scale_inv * torch.tensor([[224.0], [1792.0]])).tolist()
    [[1.0], [1.0]]

    Args:
        x: float32, bfloat16 or float16, any shape and layout.
        dtype: the FP8 format, as torch dtype, Format or name.
        granularity: "tensorwise" (one scale), "rowwise" (one for each line along `dim`), "1x128" or "1x32" (one
            for each block along `dim`), "128x128" (one for each square of a matrix).
        dim: the dimension that the matmul will contract: 1 of a left operand [M, K], 0 of a right operand
            [K, N]; without meaning for "tensorwise" and "128x128".
        power_of_two: round scales down to powers of two.
        mx_mode: how "1x32" does, see `fp8core.scaling.mx_scale_code`.

    Returns:
        Float8Tensor with x's shape and strides that advertises x's dtype. Zero groups stay zero; a group
        that holds Inf or NaN comes back as NaN throughout.

    Raises:
        TypeError: x is of another dtype (float64 would be rounded twice).
        ValueError: dtype is no FP8 element format, unknown granularity, or `dim` outside of x.
    """
    codes, scale_inv = cast.scale_and_cast(
        x, dtype, granularity, dim=dim, power_of_two=power_of_two, mx_mode=mx_mode
    )
    return Float8Tensor(codes, scale_inv, x.dtype, granularity)


def decomposed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """What an operator that consists of others yields, which inference mode alone hands on whole; else NotImplemented."""
    return op.decompose(*args, **(kwargs or {})) if torch.is_inference_mode_enabled() else NotImplemented


def implements(*ops: Any) -> Callable[[Handler], Handler]:
    """Registers what ATen operators mean for a Float8Tensor; refuses to register one twice."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            if op in _HANDLERS:
                raise ValueError(f"{op} is already implemented by {_HANDLERS[op].__name__}")
            _HANDLERS[op] = handler
        return handler

    return register


@implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _elementwise(op: Any, x: Float8Tensor, **kwargs: Any) -> Float8Tensor:
    return Float8Tensor(op(x.qdata, **kwargs), op(x.scale_inv), x.dtype, x.granularity)


@implements(aten.t.default, aten.transpose.int)
def _transpose(op: Any, x: Float8Tensor, *dims: int) -> Float8Tensor:
    scale_inv = op(x.scale_inv, *dims) if x.scale_inv.dim() else x.scale_inv
    return Float8Tensor(op(x.qdata, *dims), scale_inv, x.dtype, x.granularity)


@implements(aten.view.default, aten._unsafe_view.default)
def _view(op: Any, x: Float8Tensor, shape: Sequence[int]) -> Float8Tensor:
    codes = op(x.qdata, shape)
    if x.scale_inv.dim() == 0:
        return Float8Tensor(codes, x.scale_inv, x.dtype, x.granularity)
    lines = list(x.scale_inv.shape[:-1]) == list(x.shape[:-1])  # one line of scales for each line of codes
    if codes.shape[-1] != x.shape[-1] or not lines or x.granularity == "128x128":
        raise NotImplementedError(
            f"view of a {x.granularity} Float8Tensor from {list(x.shape)} (scales {list(x.scale_inv.shape)}) to "
            f"{list(codes.shape)} would cut its scaling groups: only a view that keeps a last, scaled dimension "
            "is defined; reshape before quantizing, or .dequantize()"
        )
    scale_inv = op(x.scale_inv, [*codes.shape[:-1], x.scale_inv.shape[-1]])
    return Float8Tensor(codes, scale_inv, x.dtype, x.granularity)


@implements(aten.slice.Tensor)
def _slice(
    op: Any, x: Float8Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Float8Tensor:
    codes, scale_inv = op(x.qdata, dim, start, end, step), x.scale_inv
    if scale_inv.dim() and scale_inv.shape[dim] == x.shape[dim]:
        scale_inv = op(scale_inv, dim, start, end, step)
    elif scale_inv.dim() and scale_inv.shape[dim] > 1:
        block = _block(x.granularity)
        first, last, _ = slice(start, end).indices(x.shape[dim])
        if step != 1 or first % block or (last % block and last != x.shape[dim]):
            raise NotImplementedError(
                f"slice {start}:{end}:{step} of dimension {dim} would cut blocks of {block}; take whole blocks, or "
                ".dequantize() first"
            )
        scale_inv = op(scale_inv, dim, first // block, -(-last // block))
    return Float8Tensor(codes, scale_inv, x.dtype, x.granularity)


@implements(aten._to_copy.default)
def _to_copy(op: Any, x: Float8Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Float8Tensor:
    """A new dtype changes what is advertised, not the codes; a new device moves codes and scale."""
    scale_inv = op(x.scale_inv, **kwargs)
    return Float8Tensor(op(x.qdata, **kwargs), scale_inv, dtype or x.dtype, x.granularity)


def _block(granularity: Granularity) -> int:
    return MX_BLOCK if granularity == "1x32" else BLOCK


def _fits(scale: torch.Size, codes: torch.Size, granularity: Granularity) -> bool:
    """Whether scales of this shape can belong to codes of that one."""
    if granularity == "tensorwise":
        return len(scale) == 0
    blocks = 1 if granularity == "rowwise" else _block(granularity)
    return len(scale) == len(codes) and all(
        s in ((1, n) if blocks == 1 else (1, n, -(-n // blocks))) for s, n in zip(scale, codes, strict=True)
    )


torch.serialization.add_safe_globals([Float8Tensor])  # torch.load(..., weights_only=True)
