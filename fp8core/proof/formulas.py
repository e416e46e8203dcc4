"""FLOPs of one operator that multiplies matrices, from the shapes of a call.

A multiplication and an addition count as two: C [M, N] = A [M, K] @ B [K, N] has 2 M K N. Elementwise work is not
counted, nor what a fused attention kernel computes again inside its backward pass.

Attention of B sequences, H query heads, Tq queries and Tk keys of D elements, values of Dv:

    forward     scores 2 B H Tq Tk D     values 2 B H Tq Tk Dv
    backward    twice each
    "full"      all Tq x Tk pairs: 12 L H Q T a token and step of PaLM, appendix B (arXiv:2204.02311)
    "half"      half of them where a fused operator is told that the mask is causal, as Megatron and MaxText count

Products that are not fused, and fused ones with a mask of their own, always count all pairs: all of them are computed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

import fp8core.gemm.grouped
import fp8core.kernels.ops  # noqa: F401  # both define operators of torch.ops.fp8core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Causal = Literal["full", "half"]
CAUSAL_SHARE: Mapping[str, float] = {
    "full": 1.0,
    "half": 0.5,
}  # of the Tq x Tk pairs of a causal fused operator

aten, ours = torch.ops.aten, torch.ops.fp8core

PRODUCT, CONVOLUTION, SCORES, VALUES = "product", "convolution", "attention scores", "attention values"


class Product(NamedTuple):
    """One matrix product of an operator's call.

    Attributes:
        role, flops: what it is, and how much.
        is_causal: a fused operator was told to mask the upper triangle.
        sizes: M, K, N of a product of two matrices.
    """

    role: str
    flops: float
    is_causal: bool = False
    sizes: tuple[int, int, int] | None = None


# Operator -> place of its left operand; FLOPs are 2 x elements of the result x the operand's last size
_LEFT: dict[Any, int] = {
    aten.mm: 0,
    aten.addmm: 1,
    aten._addmm_activation: 1,
    aten.bmm: 0,
    aten.baddbmm: 1,
    aten.mv: 0,
    aten.addmv: 1,
    aten.dot: 0,
    aten.vdot: 0,
    aten.linear: 0,
    aten._int_mm: 0,
    aten._scaled_mm: 0,
    aten._scaled_mm_v2: 0,
    aten._weight_int8pack_mm: 0,
    ours.matmul: 0,
    ours.four_bit_mm: 0,
}
_GROUPED: dict[Any, int] = {  # operator -> place of the offsets
    aten._grouped_mm: 2,
    aten._scaled_grouped_mm: 4,
    ours.grouped_mm: 2,
    ours.scaled_grouped_mm: 4,
}
# Operators of ATen and of PyTorch's own libraries that multiply matrices; one without a formula is named, not counted.
_MULTIPLIES = re.compile(
    r"mm(_|$|\d)|matmul|gemm|mv_?$|dot$|linear|rnn|lstm|gru|attention|conv|cdist|euclidean_dist|einsum|tensordot"
    r"|transformer_encoder"
)
# They match the pattern without a matrix product of their own
_ELEMENTWISE = re.compile(
    r"^_?upsample|_fused_(lstm|gru)_cell|differentiable_(lstm|gru)_cell|weight_to_int4pack|reorder|prepack|pack_(gemm|quantized)"
    r"|quantize_weight|flatten_weight|mm_search|indices_from|compute_linear_combination|vecdot|^_is_mkldnn|_nbytes"
    r"|^logcumsumexp|_convert_indices"
)
_TORCHS_OWN = ("aten", "mkldnn", "mkl", "quantized", "onednn", "_quantized", "sparse")
_WITHOUT_PRODUCTS = (
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "fsdp",
    "profiler",
    "inductor",
    "fp8core",
    "debugprims",
    "rngprims",
    "symm_mem",
    "_dtensor",
    "bucketing",
    "streams",
    "c10d_functional",
)


def products(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[Product, ...] | None:
    """The matrix products of one call.

    Args:
        func: the operator (`OpOverload`), as a `TorchDispatchMode` gets it.
        args: of the call.
        kwargs: of the call.
        out: its result.

    Returns:
        Its products, of attention over all pairs; empty if it has none; None if it has some, or may have, and there is
        no formula for them.
    """
    if isinstance(func, HigherOrderOperator) or not isinstance(func, OpOverload):
        return None if "attention" in str(func) or "triton" in str(func) else ()
    packet = func.overloadpacket
    if packet in _LEFT:
        made = _first(out)
        K = args[4] if packet is ours.four_bit_mm else args[_LEFT[packet]].shape[-1]
        sizes = (made.shape[0], K, made.shape[1]) if made.dim() == 2 else None
        return (Product(PRODUCT, 2.0 * made.numel() * K, sizes=sizes),)
    if packet in _GROUPED:
        a, b = args[:2]
        flops, rows = 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1], grouped_rows(func, args, kwargs)
        # Rows that no group has are not multiplied, so they don't count; rows of zeros within a group do here
        return (Product(PRODUCT, flops * a.shape[0] if rows is None else flops / max(_cut(a, b), 1) * rows),)
    special = _SPECIAL.get(packet)
    if special is not None:
        return (Product(PRODUCT, 2.0 * special(*args)),)
    name = packet.__name__
    if name.startswith("_scaled_dot_product") and "math" not in name:
        return _attention(func, args, kwargs)
    if packet in flop_registry:
        count = flop_registry[packet](*args, **kwargs, out_val=out)
        return (
            Product(
                CONVOLUTION if "conv" in name else SCORES if "attention" in name else PRODUCT, float(count)
            ),
        )
    return None if may_multiply(func) and _yields_floats(out) else ()


def may_multiply(func: OpOverload) -> bool:
    """Whether an operator without a formula has to be named: by its name if it is PyTorch's own, else always."""
    namespace, name = func.namespace, func.overloadpacket.__name__
    if namespace in _TORCHS_OWN:
        return bool(_MULTIPLIES.search(name)) and not _ELEMENTWISE.search(name)
    return namespace not in _WITHOUT_PRODUCTS


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, head_dim: int, value_dim: int | None = None
) -> tuple[float, float]:
    """(scores, values) of one forward pass over all pairs: see the module docstring."""
    pairs = 2.0 * batch * heads * queries * keys
    return pairs * head_dim, pairs * (head_dim if value_dim is None else value_dim)


def register_with_torch(more: Mapping[Any, Callable[..., int]] | None = None) -> None:
    """Teaches torch's FlopCounterMode the operators of fp8core, and `more` of them; may be called again.

    Args:
        more: operator -> FLOPs from the shapes of its arguments, as `torch.utils.flop_counter.register_flop_formula`
            takes it. `count_matmuls` counts by these too.
    """
    own: dict[Any, Callable[..., int]] = {
        ours.scaled_grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1],
        ours.grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1],
        ours.matmul: lambda a, b_t, *_, **__: 2 * a[0] * a[1] * b_t[0],
        ours.four_bit_mm: lambda a, b_t, _a, _b, K, *_, **__: 2 * a[0] * K * b_t[0],
        aten._scaled_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1],
    }
    for op, count in (own | dict(more or {})).items():
        if op not in flop_registry:
            register_flop_formula(op)(count)


def _attention(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Product, ...]:
    given: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    q, k, v = given["query"], given["key"], given["value"]
    is_causal = bool(given["is_causal"])
    share = 2 if "backward" in func.overloadpacket.__name__ else 1
    of_scores, of_values = attention_flops(
        q.shape[:-2].numel(), 1, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    )
    return Product(SCORES, share * of_scores, is_causal), Product(VALUES, share * of_values, is_causal)


def grouped_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows that a grouped product multiplies, those that fill up groups included; None for other operators."""
    place = _GROUPED.get(getattr(func, "overloadpacket", None))
    if place is None or args[0].dim() == args[1].dim() == 3:
        return None
    return _rows(args[place] if len(args) > place else kwargs.get("offs"), _cut(*args[:2]))


def _cut(a: Tensor, b: Tensor) -> int:
    """The size that groups are cut from."""
    return b.shape[1] if a.dim() == 3 else a.shape[0 if b.dim() == 3 else 1]


def _rows(offsets: Any, at_most: int) -> int:
    if (
        not isinstance(offsets, Tensor)
        or isinstance(offsets, FakeTensor)
        or offsets.is_meta
        or not offsets.numel()
    ):
        return at_most
    return min(int(offsets[-1]), at_most)


# Operator -> half of its FLOPs
_SPECIAL: dict[Any, Callable[..., int]] = {
    aten.linear_backward: lambda x, _, weight, mask: x.numel() * weight.shape[0] * sum(map(bool, mask[:2])),
    aten.addbmm: lambda _, a, b, **__: a.numel() * b.shape[-1],
}


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else next(part for part in out if isinstance(part, Tensor))


def _yields_floats(out: Any) -> bool:
    parts = out if isinstance(out, tuple | list) else (out,)
    return any(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
