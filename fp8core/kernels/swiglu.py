"""SwiGLU, forward and backward, that leaves an amax behind: it reads and writes anyway.

In two forms with the same arithmetic: plain, for the bfloat16 arm of a comparison; and with the amax of its result,
which spares a dynamic cast its first pass. Exponentials are float32.

Source: Shazeer 2020, arXiv 2002.05202.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import magnitude_bits, narrow, widen

# 1 / (1 + 2**(-log2(e) x)): four instructions, where Triton's own `sigmoid` takes about fifteen for the exponential's and
# the quotient's subnormal results. Those become 0: below x = -87.3, where the sigmoid is less than 2**-126.
_SIGMOID_ASM = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, t; }"
)


@triton.jit
def _sigmoid(x, NATIVE: tl.constexpr):
    """float32 block -> 1 / (1 + exp(-x)) within about |x| + 8 float32 roundings; NaN -> NaN."""
    if NATIVE:
        return tl.inline_asm_elementwise(_SIGMOID_ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.sigmoid(x)


@triton.jit
def _gated(gate, up, NATIVE: tl.constexpr):
    """silu(gate) * up, rounded to their dtype."""
    wide = widen(gate)
    return narrow(wide * _sigmoid(wide, NATIVE) * widen(up), gate.dtype, NATIVE)


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
        gate = tl.load(gate_ptr + start + offsets, mask=keep, other=0.0)
        up = tl.load(up_ptr + start + offsets, mask=keep, other=0.0)
        h = _gated(gate, up, NATIVE)
        tl.store(h_ptr + start + offsets, h, mask=keep)
        if WITH_AMAX:
            largest = tl.maximum(largest, magnitude_bits(h))
    if WITH_AMAX:
        tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _swiglu_backward_kernel(
    grad_h_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    numel,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        keep = offsets < numel - start
        grad_h = widen(tl.load(grad_h_ptr + start + offsets, mask=keep, other=0.0))
        gate = widen(tl.load(gate_ptr + start + offsets, mask=keep, other=0.0))
        up = widen(tl.load(up_ptr + start + offsets, mask=keep, other=0.0))
        s = _sigmoid(gate, NATIVE)
        grad_gate = narrow(grad_h * up * s * (1 + gate * (1 - s)), grad_gate_ptr.dtype.element_ty, NATIVE)
        grad_up = narrow(grad_h * (gate * s), grad_up_ptr.dtype.element_ty, NATIVE)
        tl.store(grad_gate_ptr + start + offsets, grad_gate, mask=keep)
        tl.store(grad_up_ptr + start + offsets, grad_up, mask=keep)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Triton version of `reference.swiglu`; both contiguous."""
    return _swiglu(gate, up, None)


def swiglu_amax(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.swiglu_amax`; both contiguous."""
    seen = launch.zero(gate.device)
    return _swiglu(gate, up, seen), seen


def _swiglu(gate: torch.Tensor, up: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    h = torch.empty_like(gate)
    block = 2048
    bits = h if seen is None else seen.view(torch.int32)  # h: never touched
    launch.launch(
        _swiglu_kernel,
        launch.walking(launch.ceil_div(gate.numel(), block)),
        *(gate, up, h, bits, gate.numel()),
        device=gate.device,
        WITH_AMAX=seen is not None,
        NATIVE=launch.target_of(gate.device).native_cast,
        BLOCK=block,
        num_warps=4,
    )
    return h


def swiglu_backward(
    grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.swiglu_backward`; all contiguous."""
    grads = torch.empty_like(gate), torch.empty_like(up)
    block = 1024
    launch.launch(
        _swiglu_backward_kernel,
        launch.walking(launch.ceil_div(gate.numel(), block)),
        *(grad_h, gate, up, *grads, gate.numel()),
        device=gate.device,
        NATIVE=launch.target_of(gate.device).native_cast,
        BLOCK=block,
        num_warps=4,
    )
    return grads
