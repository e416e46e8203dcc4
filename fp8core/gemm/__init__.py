"""Scaled matmul on plain (codes, scale_inv) pairs.

    D [M, N] = (A_codes * A_scale_inv) [M, K] @ (B_codes * B_scale_inv) [K, N]

A backend is a class in a module of its own and one entry in `BACKENDS`, or an entry point of another package in the group
`fp8_harness.backends` (`fp8core.extensions`). Backends do not know each other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from fp8core.arguments import any_autocast, autocast_enabled, check_known
from fp8core.extensions import ExtensionTable, of_type
from fp8core.formats import E4M3FN, E8M0FNU, as_element_format
from fp8core.gemm import reference, torch_mm, triton_mm
from fp8core.gemm.backend import Backend
from fp8core.gemm.layout import granularity_of
from fp8core.scaling import BLOCK, FOUR_BIT_BLOCK, MX_BLOCK

if TYPE_CHECKING:
    from fp8core.gemm.layout import Scaled


_TORCH, _TRITON = torch_mm.Torch(), triton_mm.Triton()
KNOWN: dict[
    str, Backend
] = {  # those of `BACKENDS` that are loaded; a plain dict, which the compiler can read
    backend.name: backend
    for backend in (
        _TORCH,
        _TRITON,
        reference.Reference("reference"),
        reference.Reference("reference_bf16", _TORCH.bf16_only),
    )
}
BACKENDS = ExtensionTable("backends", KNOWN, of_type(Backend))


def backend_named(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: unknown; the message lists the known names. Or an extension's that cannot be used; it says why.
    """
    if name not in KNOWN:
        check_known("GEMM backend", name, BACKENDS)
        return BACKENDS[name]
    return KNOWN[name]


def scaled_mm(
    a: Scaled,
    b: Scaled,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    backend: str = "torch",
) -> torch.Tensor:
    """Multiplies two quantised matrices.

    Args:
        a: [M, K] codes, row-major unless backend is "reference"; scale_inv one of the table below.
        b: [K, N] codes, column-major unless backend is "reference"; scale_inv one of the table below.
        out_dtype: of the result; float64 (backend "reference" only) also accumulates in float64.
        use_fast_accum: let the hardware accumulate with fewer bits for all of K; no effect on CPU or in "reference".
        backend: a key of `BACKENDS`.

        granularity   scale_inv of a                       scale_inv of b
        tensorwise    []                                   []
        rowwise       [M, 1]                               [1, N]
        1x128         [M, ceil(K/128)]                     [ceil(K/128), N]
        128x128       [ceil(M/128), ceil(K/128)]           [ceil(K/128), ceil(N/128)]
        1x32, e8m0    [M, ceil(K/32)]                      [ceil(K/32), N]
        1x16, e4m3    [M, K/16], of e2m1 alone             [K/16, N]

    e2m1 is uint8, two codes a byte along K: [M, K/2] and [K/2, N]. The sum is multiplied by `Operand.tensor_scale_inv`, in
    float32, before it is rounded.

    If one operand is scaled tensorwise and the other rowwise, the single scale is repeated, which is exact:
    no kernel takes mixed granularities.

    Returns:
        [M, N] in out_dtype. Non-finite elements propagate; K = 0 gives zeros.

    Raises:
        ValueError: operands that do not fit each other, an unknown backend, or what the hardware refuses.
        TypeError: codes that are not FP8, or scales that are not float32.
    """
    a_codes, b_codes, scale_inv_a, scale_inv_b = a.qdata, b.qdata, a.scale_inv, b.scale_inv
    compiling = torch.compiler.is_compiling()
    if (compiling or any_autocast()) and autocast_enabled(a_codes):
        # Without this, "reference" and the CPU kernel of "torch" would round their operands to bfloat16.
        with torch.autocast(a_codes.device.type, enabled=False):
            return scaled_mm(a, b, out_dtype, use_fast_accum, backend)
    library = KNOWN.get(backend) or backend_named(backend)
    facts = (
        library,
        a_codes.shape,
        b_codes.shape,
        scale_inv_a.shape,
        scale_inv_b.shape,
        a_codes.dtype,
        b_codes.dtype,
        scale_inv_a.dtype,
        scale_inv_b.dtype,
        out_dtype,
        a_codes.device,
    )
    try:
        one_scale = _check_product(*facts) if compiling else _checked_once(*facts)
    except TypeError:  # a symbolic size can't be hashed; what else raises it does so again
        one_scale = _check_product(*facts)
    if one_scale:
        if scale_inv_a.dim():
            scale_inv_b = scale_inv_b.expand(1, b_codes.shape[1]).contiguous()
        else:
            scale_inv_a = scale_inv_a.expand(a_codes.shape[0], 1).contiguous()
    of_a, of_b = getattr(a, "tensor_scale_inv", None), getattr(b, "tensor_scale_inv", None)
    if of_a is None and of_b is None:
        return library.matmul(a_codes, b_codes, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    product = library.matmul(a_codes, b_codes, scale_inv_a, scale_inv_b, wide, use_fast_accum)
    for scale in (of_a, of_b):
        product = product if scale is None else product * scale.to(wide)
    return product.to(out_dtype)


def _check_product(
    library: Backend,
    a: torch.Size,
    b: torch.Size,
    scale_inv_a: torch.Size,
    scale_inv_b: torch.Size,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    scale_dtype_a: torch.dtype,
    scale_dtype_b: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Refuses operands that do not fit each other, or that the backend refuses.

    True: one is scaled tensorwise, and its scale must be repeated for each line of the other.
    """
    if a_dtype == torch.uint8 and len(a) == 2:  # two codes a byte
        a = torch.Size((a[0], 2 * a[1]))
    if b_dtype == torch.uint8 and len(b) == 2:
        b = torch.Size((2 * b[0], b[1]))
    _check_operand("a", 1, a, a_dtype, scale_inv_a, scale_dtype_a)
    _check_operand("b", 0, b, b_dtype, scale_inv_b, scale_dtype_b)
    if a[1] != b[0]:
        raise ValueError(f"a is {list(a)} and b is {list(b)}: a's columns must equal b's rows")
    groups_a, groups_b = scale_inv_a[1] if scale_inv_a else 0, scale_inv_b[0] if scale_inv_b else 0
    mixed = scale_dtype_a != scale_dtype_b or groups_a != groups_b
    if mixed and not (
        (not scale_inv_b and list(scale_inv_a) == [a[0], 1])
        or (not scale_inv_a and list(scale_inv_b) == [1, b[1]])
    ):
        raise ValueError(
            f"scales {list(scale_inv_a)} {scale_dtype_a} of a and {list(scale_inv_b)} {scale_dtype_b} of b cut "
            f"K = {a[1]} differently; only tensorwise and rowwise mix"
        )
    granularity = "rowwise" if mixed else granularity_of(a, b, scale_inv_a, scale_inv_b, scale_dtype_a)
    reason = library.shape_reason(a[0], a[1], b[1], a_dtype, b_dtype, granularity, out_dtype)
    reason = reason or library.granularity_reason(device, granularity)
    if reason is not None:
        raise ValueError(reason)
    return mixed


# In eager mode alone: a compiler would see the cache. What raises is not kept
_checked_once = lru_cache(maxsize=4096)(_check_product)


def _check_operand(
    name: str,
    reduced_dim: int,
    codes: torch.Size,
    dtype: torch.dtype,
    scale_inv: torch.Size,
    scale_dtype: torch.dtype,
) -> None:
    """Codes must be an FP8 matrix, and the scale one number, one a line along `reduced_dim`, or one a block."""
    if len(codes) != 2:
        raise ValueError(
            f"{name} has shape {list(codes)}; expected a matrix, flatten leading dimensions first"
        )
    four_bit = dtype == torch.uint8
    if not four_bit:
        if not dtype.is_floating_point or dtype.itemsize != 1:
            raise TypeError(f"{name} has dtype {dtype}; expected FP8 codes, see fp8core.quantize")
        as_element_format(dtype)
    if scale_dtype not in (E4M3FN.dtype if four_bit else torch.float32, E8M0FNU.dtype):
        expected = "float8_e4m3fn for blocks of 16" if four_bit else "float32"
        raise TypeError(
            f"{name}.scale_inv has dtype {scale_dtype}; expected {expected}, or float8_e8m0fnu for blocks of 32"
        )
    lines, along = codes[1 - reduced_dim], codes[reduced_dim]
    if scale_dtype == E4M3FN.dtype:
        allowed = [(lines, -(-along // FOUR_BIT_BLOCK))]
    elif scale_dtype == E8M0FNU.dtype:
        allowed = [(lines, -(-along // MX_BLOCK))]
    else:
        blocks = -(-along // BLOCK)
        allowed = [(lines, 1), (lines, blocks), (-(-lines // BLOCK), blocks)]
    shapes = [[n, g] if reduced_dim else [g, n] for n, g in allowed]
    if list(scale_inv) not in ([[], *shapes] if scale_dtype == torch.float32 else shapes):
        raise ValueError(
            f"{name}.scale_inv has shape {list(scale_inv)}; expected [] or {shapes[0]}: "
            f"scale {name} along its contracted dimension (dim={reduced_dim})"
            + (f"; or {' or '.join(map(str, shapes[1:]))} for blocks" if shapes[1:] else "")
        )
