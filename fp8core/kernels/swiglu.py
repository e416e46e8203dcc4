"""SwiGLU, forward and backward, that leaves an amax, or codes, behind: it reads and writes anyway.

In three forms with the same arithmetic: plain, for the bfloat16 arm of a comparison; with the amax of its result,
which spares a dynamic cast its first pass; and with both layouts of codes instead of the result, by the amax of an
earlier step. Codes are those of the result *rounded to the input's dtype*; exponentials are float32.

Source: Shazeer 2020, arXiv 2002.05202.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import encode, leave_amax, magnitude_bits, narrow, tensor_scale, widen


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    amax_bits_ptr,
    numel,
    WITH_AMAX: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        keep = offsets < numel - start
        gate = widen(tl.load(gate_ptr + start + offsets, mask=keep, other=0.0))
        up = widen(tl.load(up_ptr + start + offsets, mask=keep, other=0.0))
        h = narrow(gate * tl.sigmoid(gate) * up, h_ptr.dtype.element_ty, NATIVE)
        tl.store(h_ptr + start + offsets, h, mask=keep)
        if WITH_AMAX:
            largest = tl.maximum(largest, magnitude_bits(h))
    if WITH_AMAX:
        tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _swiglu_cast_kernel(
    gate_ptr,
    up_ptr,
    codes_ptr,
    codes_t_ptr,
    amax_ptr,
    scale_inv_bits_ptr,
    seen_bits_ptr,
    M,
    K,
    FACTOR: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    scale = tensor_scale(amax_ptr, scale_inv_bits_ptr, FACTOR, True, E5M2, POWER_OF_TWO)
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_k
    largest = tl.zeros((BLOCK_M,), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m = (tile // tiles_k) * BLOCK_M + tl.arange(0, BLOCK_M)
        k = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
        keep = (m[:, None] < M) & (k[None, :] < K)
        at = m.to(tl.int64)[:, None] * K + k[None, :]
        gate = widen(tl.load(gate_ptr + at, mask=keep, other=0.0))
        up = widen(tl.load(up_ptr + at, mask=keep, other=0.0))
        h = narrow(gate * tl.sigmoid(gate) * up, gate_ptr.dtype.element_ty, NATIVE)
        largest = tl.maximum(largest, tl.max(magnitude_bits(h), 1))
        codes = encode(widen(h) * scale, E5M2, NATIVE)
        tl.store(codes_ptr + at, codes, mask=keep)
        at_t = k.to(tl.int64)[:, None] * M + m[None, :]
        tl.store(codes_t_ptr + at_t, tl.trans(codes), mask=(k[:, None] < K) & (m[None, :] < M))
    leave_amax(tl.max(largest, 0), seen_bits_ptr, scale_inv_bits_ptr)


@triton.jit
def _swiglu_backward_kernel(
    grad_h_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    gate_amax_bits_ptr,
    up_amax_bits_ptr,
    numel,
    WITH_AMAX: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    largest_gate = tl.zeros((BLOCK,), tl.int32)
    largest_up = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        keep = offsets < numel - start
        grad_h = widen(tl.load(grad_h_ptr + start + offsets, mask=keep, other=0.0))
        gate = widen(tl.load(gate_ptr + start + offsets, mask=keep, other=0.0))
        up = widen(tl.load(up_ptr + start + offsets, mask=keep, other=0.0))
        s = tl.sigmoid(gate)
        grad_gate = narrow(grad_h * up * s * (1 + gate * (1 - s)), grad_gate_ptr.dtype.element_ty, NATIVE)
        grad_up = narrow(grad_h * (gate * s), grad_up_ptr.dtype.element_ty, NATIVE)
        tl.store(grad_gate_ptr + start + offsets, grad_gate, mask=keep)
        tl.store(grad_up_ptr + start + offsets, grad_up, mask=keep)
        if WITH_AMAX:
            largest_gate = tl.maximum(largest_gate, magnitude_bits(grad_gate))
            largest_up = tl.maximum(largest_up, magnitude_bits(grad_up))
    if WITH_AMAX:
        tl.atomic_max(gate_amax_bits_ptr, tl.max(largest_gate, 0), sem="relaxed")
        tl.atomic_max(up_amax_bits_ptr, tl.max(largest_up, 0), sem="relaxed")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `reference.swiglu`; both contiguous."""
    return _swiglu(gate, up, None)


def swiglu_amax(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_amax`; both contiguous."""
    seen = launch.zero(gate.device)
    return _swiglu(gate, up, seen), seen


def _swiglu(gate: torch.Tensor, up: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    h = torch.empty_like(gate)
    block = 4096
    bits = h if seen is None else seen.view(torch.int32)  # h: never touched
    launch.launch(
        _swiglu_kernel,
        launch.persistent_grid(launch.ceil_div(gate.numel(), block), gate.device),
        *(gate, up, h, bits, gate.numel()),
        device=gate.device,
        WITH_AMAX=seen is not None,
        NATIVE=launch.target_of(gate.device).native_cast,
        BLOCK=block,
    )
    return h


def swiglu_cast_delayed_both(
    gate: torch.Tensor,
    up: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_cast_delayed_both`; both [M, K] row-major."""
    M, K = gate.shape
    codes = torch.empty((M, K), dtype=dtype, device=gate.device)
    codes_t = torch.empty((K, M), dtype=dtype, device=gate.device)
    scale_inv, seen = launch.zero(gate.device), launch.zero(gate.device)
    tile = {"BLOCK_M": 128, "BLOCK_K": 64}
    launch.launch(
        _swiglu_cast_kernel,
        launch.persistent_grid(
            launch.ceil_div(M, tile["BLOCK_M"]) * launch.ceil_div(K, tile["BLOCK_K"]), gate.device
        ),
        *(gate, up, codes.view(torch.uint8), codes_t.view(torch.uint8), amax),
        *(scale_inv.view(torch.int32), seen.view(torch.int32), M, K),
        device=gate.device,
        FACTOR=2.0**margin,
        E5M2=dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        NATIVE=launch.target_of(gate.device).native_cast,
        **tile,
    )
    return codes, codes_t, scale_inv, seen


def swiglu_backward(
    grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_backward`; all contiguous."""
    return _swiglu_backward(grad_h, gate, up, None)


def swiglu_backward_amax(
    grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_backward_amax`; all contiguous."""
    seen = launch.zero(gate.device), launch.zero(gate.device)
    return *_swiglu_backward(grad_h, gate, up, seen), *seen


def _swiglu_backward(
    grad_h: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    seen: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    grads = torch.empty_like(gate), torch.empty_like(up)
    block = 2048
    bits = grads if seen is None else tuple(s.view(torch.int32) for s in seen)  # grads: never touched
    launch.launch(
        _swiglu_backward_kernel,
        launch.persistent_grid(launch.ceil_div(gate.numel(), block), gate.device),
        *(grad_h, gate, up, *grads, *bits, gate.numel()),
        device=gate.device,
        WITH_AMAX=seen is not None,
        NATIVE=launch.target_of(gate.device).native_cast,
        BLOCK=block,
    )
    return grads
