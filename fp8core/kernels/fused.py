"""RMSNorm and SwiGLU that leave an amax, or codes, behind: the producer reads and writes anyway.

Each comes in three forms with the same arithmetic: plain, for the bfloat16 arm of a comparison; with the amax
of its result, which spares a dynamic cast its first pass (6 bytes an element become 4); and with codes instead
of the result, by a given (delayed) scale or, for the norm, by the scale of each row.

Codes are those of the result *rounded to the input's dtype*, so that a fused cast yields the very bytes of
the unfused one. Sums and exponentials are float32.

Norms keep a whole row in one program, up to `MAX_COLUMNS`; programs walk over rows, so that there is one
atomic for each program. For the transposed codes of a norm, cast its plain result with `cast.cast_both`.

Source: RMSNorm, Zhang and Sennrich 2019, arXiv 1910.07467; SwiGLU, Shazeer 2020, arXiv 2002.05202.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import encode, magnitude_bits, narrow, reciprocal, scale_of, widen

MAX_COLUMNS = 65536
PROGRAMS_PER_PROCESSOR = 4
PLAIN, AMAX, DELAYED, ROWWISE = (tl.constexpr(i) for i in range(4))  # what a kernel makes of its result


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,  # result or, with DELAYED and ROWWISE, codes
    rstd_ptr,
    scale_ptr,  # with DELAYED
    result_ptr,  # amax as int32 bits, or with ROWWISE scale_inv [M]
    M,
    K,
    eps,
    OUTPUT: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
    largest = tl.zeros((BLOCK_K,), tl.int32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * K + k
        x = widen(tl.load(x_ptr + at, mask=k < K, other=0.0))
        rstd = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        tl.store(rstd_ptr + row, rstd)
        y = narrow(x * rstd * weight, x_ptr.dtype.element_ty, NATIVE)
        if OUTPUT == PLAIN:
            tl.store(y_ptr + at, y, mask=k < K)
        elif OUTPUT == AMAX:
            tl.store(y_ptr + at, y, mask=k < K)
            largest = tl.maximum(largest, magnitude_bits(y))
        elif OUTPUT == DELAYED:
            tl.store(y_ptr + at, encode(widen(y) * tl.load(scale_ptr), E5M2, NATIVE), mask=k < K)
            largest = tl.maximum(largest, magnitude_bits(y))
        else:
            amax = tl.max(magnitude_bits(y), 0).to(tl.float32, bitcast=True)
            scale = scale_of(amax, E5M2, POWER_OF_TWO)
            tl.store(y_ptr + at, encode(widen(y) * scale, E5M2, NATIVE), mask=k < K)
            tl.store(result_ptr + row, reciprocal(scale))
    if OUTPUT != PLAIN and OUTPUT != ROWWISE:
        tl.atomic_max(result_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _rms_norm_backward_kernel(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_ptr,  # float32 [programs, K]: each program's sum of grad_weight
    amax_bits_ptr,
    M,
    K,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
    grad_weight = tl.zeros((BLOCK_K,), tl.float32)
    largest = tl.zeros((BLOCK_K,), tl.int32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * K + k
        rstd = tl.load(rstd_ptr + row)
        n = widen(tl.load(x_ptr + at, mask=k < K, other=0.0)) * rstd
        grad_y = widen(tl.load(grad_y_ptr + at, mask=k < K, other=0.0))
        g = grad_y * weight
        grad_x = narrow(rstd * (g - n * (tl.sum(g * n, 0) / K)), grad_x_ptr.dtype.element_ty, NATIVE)
        tl.store(grad_x_ptr + at, grad_x, mask=k < K)
        largest = tl.maximum(largest, tl.where(k < K, magnitude_bits(grad_x), 0))
        grad_weight += grad_y * n
    tl.store(partial_ptr + tl.program_id(0) * K + k, grad_weight, mask=k < K)
    tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    amax_bits_ptr,
    numel,
    OUTPUT: tl.constexpr,
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
        if OUTPUT == AMAX:
            largest = tl.maximum(largest, magnitude_bits(h))
    if OUTPUT == AMAX:
        tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _swiglu_cast_kernel(
    gate_ptr,
    up_ptr,
    codes_ptr,
    codes_t_ptr,
    scale_ptr,
    amax_bits_ptr,
    M,
    K,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    scale = tl.load(scale_ptr)
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
    tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


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
    OUTPUT: tl.constexpr,
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
        if OUTPUT == AMAX:
            largest_gate = tl.maximum(largest_gate, magnitude_bits(grad_gate))
            largest_up = tl.maximum(largest_up, magnitude_bits(grad_up))
    if OUTPUT == AMAX:
        tl.atomic_max(gate_amax_bits_ptr, tl.max(largest_gate, 0), sem="relaxed")
        tl.atomic_max(up_amax_bits_ptr, tl.max(largest_up, 0), sem="relaxed")


def _programs(x: torch.Tensor, work: int) -> tuple[int]:
    return (min(work, launch.target_of(x.device).processors * PROGRAMS_PER_PROCESSOR),)


def _zero_amax(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device=x.device)


def _norm_block(K: int) -> dict[str, int]:
    if K > MAX_COLUMNS:
        raise ValueError(f"the norm kernels hold rows of up to {MAX_COLUMNS} columns on chip, not {K}")
    block = launch.next_power_of_two(K)
    return {"BLOCK_K": block, "num_warps": min(max(block // 512, 4), 16)}


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor,
    scale: torch.Tensor,
    result: torch.Tensor,
    output: tl.constexpr,
    dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> torch.Tensor:
    """Fills y and result, returns rstd."""
    M, K = x.shape
    rstd = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    launch.launch(
        _rms_norm_kernel,
        _programs(x, M),
        *(x, weight, y, rstd, scale, result, M, K, eps),
        device=x.device,
        OUTPUT=output.value,
        E5M2=dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        NATIVE=launch.target_of(x.device).native_cast,
        **_norm_block(K),
    )
    return rstd


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.rms_norm`; x [M, K] row-major."""
    y = torch.empty_like(x)
    unused = x
    return y, _rms_norm(x, weight, eps, y, unused, unused, PLAIN)


def rms_norm_amax(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.rms_norm_amax`; x [M, K] row-major."""
    y, amax = torch.empty_like(x), _zero_amax(x)
    unused = x
    return y, _rms_norm(x, weight, eps, y, unused, amax.view(torch.int32), AMAX), amax


def rms_norm_cast_delayed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.rms_norm_cast_delayed`; x [M, K] row-major."""
    codes, amax = torch.empty(x.shape, dtype=dtype, device=x.device), _zero_amax(x)
    result = amax.view(torch.int32)
    rstd = _rms_norm(x, weight, eps, codes.view(torch.uint8), scale, result, DELAYED, dtype)
    return codes, rstd, amax


def rms_norm_cast_rowwise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.rms_norm_cast_rowwise`; x [M, K] row-major."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_inv = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    unused = x
    y = codes.view(torch.uint8)
    rstd = _rms_norm(x, weight, eps, y, unused, scale_inv, ROWWISE, dtype, power_of_two)
    return codes, rstd, scale_inv


def rms_norm_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.rms_norm_backward`; grad_y and x [M, K] row-major."""
    M, K = x.shape
    grad_x, amax = torch.empty_like(x), _zero_amax(x)
    grid = _programs(x, M)
    partial = torch.empty((grid[0], K), dtype=torch.float32, device=x.device)
    launch.launch(
        _rms_norm_backward_kernel,
        grid,
        *(grad_y, x, weight, rstd, grad_x, partial, amax.view(torch.int32), M, K),
        device=x.device,
        NATIVE=launch.target_of(x.device).native_cast,
        **_norm_block(K),
    )
    return grad_x, partial.sum(0).to(weight.dtype), amax


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `reference.swiglu`; both contiguous."""
    h = torch.empty_like(gate)
    _swiglu(gate, up, h, gate, PLAIN)
    return h


def swiglu_amax(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_amax`; both contiguous."""
    h, amax = torch.empty_like(gate), _zero_amax(gate)
    _swiglu(gate, up, h, amax.view(torch.int32), AMAX)
    return h, amax


def _swiglu(
    gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor, result: torch.Tensor, output: tl.constexpr
) -> None:
    block = 4096
    launch.launch(
        _swiglu_kernel,
        _programs(gate, launch.ceil_div(gate.numel(), block)),
        *(gate, up, h, result, gate.numel()),
        device=gate.device,
        OUTPUT=output.value,
        NATIVE=launch.target_of(gate.device).native_cast,
        BLOCK=block,
    )


def swiglu_cast_delayed_both(
    gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_cast_delayed_both`; both [M, K] row-major."""
    M, K = gate.shape
    codes = torch.empty((M, K), dtype=dtype, device=gate.device)
    codes_t = torch.empty((K, M), dtype=dtype, device=gate.device)
    amax = _zero_amax(gate)
    tile = {"BLOCK_M": 128, "BLOCK_K": 64}
    launch.launch(
        _swiglu_cast_kernel,
        _programs(gate, launch.ceil_div(M, 128) * launch.ceil_div(K, 64)),
        *(gate, up, codes.view(torch.uint8), codes_t.view(torch.uint8), scale, amax.view(torch.int32), M, K),
        device=gate.device,
        E5M2=dtype == torch.float8_e5m2,
        NATIVE=launch.target_of(gate.device).native_cast,
        **tile,
    )
    return codes, codes_t, amax


def swiglu_backward(
    grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_backward`; all contiguous."""
    grads = torch.empty_like(gate), torch.empty_like(up)
    _swiglu_backward(grad_h, gate, up, grads, (gate, gate), PLAIN)
    return grads


def swiglu_backward_amax(
    grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.swiglu_backward_amax`; all contiguous."""
    grads = torch.empty_like(gate), torch.empty_like(up)
    gate_amax, up_amax = _zero_amax(gate), _zero_amax(up)
    results = gate_amax.view(torch.int32), up_amax.view(torch.int32)
    _swiglu_backward(grad_h, gate, up, grads, results, AMAX)
    return *grads, gate_amax, up_amax


def _swiglu_backward(
    grad_h: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    output: tl.constexpr,
) -> None:
    block = 2048
    launch.launch(
        _swiglu_backward_kernel,
        _programs(gate, launch.ceil_div(gate.numel(), block)),
        *(grad_h, gate, up, *grads, *results, gate.numel()),
        device=gate.device,
        OUTPUT=output.value,
        NATIVE=launch.target_of(gate.device).native_cast,
        BLOCK=block,
    )
