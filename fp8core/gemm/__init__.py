"""Scaled matmul on plain (codes, scale_inv) pairs.

    D [M, N] = (A_codes * A_scale_inv) [M, K] @ (B_codes * B_scale_inv) [K, N]

A backend is a function in a module of its own and one line in `BACKENDS`. Backends do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fp8core.formats import as_element_format
from fp8core.gemm import reference, torch_mm

if TYPE_CHECKING:
    from fp8core.gemm.layout import Scaled


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
        """A [M, K] @ B [K, N] with their scales, both 0-dimensional or [M, 1] and [1, N]."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """A scaled matmul. `is_fp8`: it feeds FP8 to the matrix units, and so obeys `fp8core.gemm.layout`."""

    matmul: Matmul
    is_fp8: bool


BACKENDS: dict[str, Backend] = {
    "torch": Backend(torch_mm.matmul, is_fp8=True),
    "reference": Backend(reference.matmul, is_fp8=False),
}


def backend_named(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown GEMM backend {name!r}; known: {', '.join(BACKENDS)}")
    return BACKENDS[name]


def scaled_mm(
    a: Scaled,
    b: Scaled,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    backend: str = "torch",
) -> torch.Tensor:
    """Multiplies two quantised matrices.

    Args:
        a: [M, K] codes, row-major for backend "torch"; scale_inv 0-dimensional or [M, 1].
        b: [K, N] codes, column-major for backend "torch"; scale_inv 0-dimensional or [1, N].
        out_dtype: of the result; float64 (backend "reference" only) also accumulates in float64.
        use_fast_accum: let the hardware accumulate with fewer bits; no effect on CPU or in "reference".
        backend: a key of `BACKENDS`.

    If one operand is scaled tensorwise and the other rowwise, the single scale is repeated, which is exact:
    no kernel takes mixed granularities.

    Returns:
        [M, N] in out_dtype. Non-finite elements propagate; K = 0 gives zeros.

    Raises:
        ValueError: operands that do not fit each other, an unknown backend, or what the hardware refuses.
        TypeError: codes that are not FP8, or scales that are not float32.
    """
    device = a.qdata.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # Without this, "reference" and the CPU kernel of "torch" would round their operands to bfloat16.
        with torch.autocast(device, enabled=False):
            return scaled_mm(a, b, out_dtype, use_fast_accum, backend)
    _check_operand(a, "a", reduced_dim=1)
    _check_operand(b, "b", reduced_dim=0)
    a_codes, b_codes = a.qdata, b.qdata
    if a_codes.shape[1] != b_codes.shape[0]:
        raise ValueError(
            f"a is {list(a_codes.shape)} and b is {list(b_codes.shape)}: a's columns must equal b's rows"
        )
    scale_inv_a, scale_inv_b = a.scale_inv, b.scale_inv
    if scale_inv_a.dim() != scale_inv_b.dim():
        if scale_inv_a.dim() == 0:
            scale_inv_a = scale_inv_a.expand(a_codes.shape[0], 1).contiguous()
        else:
            scale_inv_b = scale_inv_b.expand(1, b_codes.shape[1]).contiguous()
    return backend_named(backend).matmul(
        a_codes, b_codes, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum
    )


def _check_operand(operand: Scaled, name: str, reduced_dim: int) -> None:
    """Codes must be an FP8 matrix, and the scale one number or one for each line along `reduced_dim`."""
    codes, scale_inv = operand.qdata, operand.scale_inv
    if codes.dim() != 2:
        raise ValueError(
            f"{name} has shape {list(codes.shape)}; expected a matrix, flatten leading dimensions first"
        )
    if not codes.dtype.is_floating_point or codes.dtype.itemsize != 1:
        raise TypeError(f"{name} has dtype {codes.dtype}; expected FP8 codes, see fp8core.quantize")
    as_element_format(codes.dtype)
    if scale_inv.dtype != torch.float32:
        raise TypeError(f"{name}.scale_inv has dtype {scale_inv.dtype}; expected float32")
    expected = list(codes.shape)
    expected[reduced_dim] = 1
    if scale_inv.dim() and list(scale_inv.shape) != expected:
        raise ValueError(
            f"{name}.scale_inv has shape {list(scale_inv.shape)}; expected [] or {expected}: "
            f"scale {name} along its contracted dimension (dim={reduced_dim})"
        )
