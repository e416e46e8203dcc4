"""RMSNorm that leaves an amax, or codes, behind: the producer reads and writes anyway.

Each form also comes with the addition before it, sum = x + delta, rounded to the input's dtype: one read of each and no
read of the sum. Its backward pass adds the gradients of sum and norm before it rounds.

In four forms with the same arithmetic: plain, for the bfloat16 arm of a comparison; with the amax of its result,
which spares a dynamic cast its first pass (6 bytes an element become 4); and with codes instead of the result, by
the amax of an earlier step or by the scale of each row.

Codes are those of the result *rounded to the input's dtype*, so that a fused cast yields the very bytes of
the unfused one. Sums are float32.

A whole row is held in one program, up to `MAX_COLUMNS`; programs walk over rows, so that there is one atomic for
each program. `norm_both` writes transposed codes as well.

Source: Zhang and Sennrich 2019, arXiv 1910.07467.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import (
    encode,
    leave_amax,
    magnitude_bits,
    narrow,
    reciprocal,
    scale_of,
    tensor_scale,
    widen,
)

MAX_COLUMNS = 65536
PLAIN, AMAX, DELAYED, ROWWISE = (tl.constexpr(i) for i in range(4))  # what the kernel makes of its result


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,  # with ADD
    sum_ptr,  # with ADD
    weight_ptr,
    y_ptr,  # result or, with DELAYED and ROWWISE, codes
    rstd_ptr,
    amax_ptr,  # of an earlier step, with DELAYED
    scale_inv_bits_ptr,  # with DELAYED, and with ROWWISE [M]
    seen_bits_ptr,  # with AMAX and DELAYED
    M,
    K,
    eps,
    ADD: tl.constexpr,
    OUTPUT: tl.constexpr,
    FACTOR: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
    largest = tl.zeros((BLOCK_K,), tl.int32)
    if OUTPUT == DELAYED:
        scale = tensor_scale(amax_ptr, scale_inv_bits_ptr, FACTOR, True, E5M2, POWER_OF_TWO)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * K + k
        x = widen(tl.load(x_ptr + at, mask=k < K, other=0.0))
        if ADD:
            delta = widen(tl.load(delta_ptr + at, mask=k < K, other=0.0))
            total = narrow(x + delta, x_ptr.dtype.element_ty, NATIVE)
            tl.store(sum_ptr + at, total, mask=k < K)
            x = widen(total)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        tl.store(rstd_ptr + row, rstd)
        y = narrow(x * rstd * weight, x_ptr.dtype.element_ty, NATIVE)
        if OUTPUT == PLAIN:
            tl.store(y_ptr + at, y, mask=k < K)
        elif OUTPUT == AMAX:
            tl.store(y_ptr + at, y, mask=k < K)
            largest = tl.maximum(largest, magnitude_bits(y))
        elif OUTPUT == DELAYED:
            tl.store(y_ptr + at, encode(widen(y) * scale, E5M2, NATIVE), mask=k < K)
            largest = tl.maximum(largest, magnitude_bits(y))
        else:
            amax = tl.max(magnitude_bits(y), 0).to(tl.float32, bitcast=True)
            row_scale = scale_of(amax, E5M2, POWER_OF_TWO)
            tl.store(y_ptr + at, encode(widen(y) * row_scale, E5M2, NATIVE), mask=k < K)
            tl.store(scale_inv_bits_ptr + row, reciprocal(row_scale).to(tl.int32, bitcast=True))
    if OUTPUT == AMAX:
        tl.atomic_max(seen_bits_ptr, tl.max(largest, 0), sem="relaxed")
    elif OUTPUT == DELAYED:
        leave_amax(tl.max(largest, 0), seen_bits_ptr, scale_inv_bits_ptr)


@triton.jit
def _rms_norm_backward_kernel(
    grad_y_ptr,
    grad_sum_ptr,  # with ADD
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_ptr,  # float32 [programs, K]: each program's sum of grad_weight
    amax_bits_ptr,
    M,
    K,
    ADD: tl.constexpr,
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
        exact = rstd * (g - n * (tl.sum(g * n, 0) / K))
        if ADD:
            exact += widen(tl.load(grad_sum_ptr + at, mask=k < K, other=0.0))
        grad_x = narrow(exact, grad_x_ptr.dtype.element_ty, NATIVE)
        tl.store(grad_x_ptr + at, grad_x, mask=k < K)
        largest = tl.maximum(largest, tl.where(k < K, magnitude_bits(grad_x), 0))
        grad_weight += grad_y * n
    tl.store(partial_ptr + tl.program_id(0) * K + k, grad_weight, mask=k < K)
    tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


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
    output: tl.constexpr,
    *,
    delta: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    power_of_two: bool = False,
    margin: int = 0,
) -> torch.Tensor:
    """Fills y, the results that `output` has, and with `delta` the sum `total`; returns rstd."""
    M, K = x.shape
    rstd = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    results = (
        rstd if result is None else result for result in (amax, scale_inv, seen)
    )  # rstd: never touched
    expected, scale_inv, seen = results
    launch.launch(
        _rms_norm_kernel,
        launch.persistent_grid(x.shape[0], x.device),
        *(
            x,
            x if delta is None else delta,
            x if total is None else total,
            weight,
            y,
            rstd,
            expected,
            scale_inv.view(torch.int32),
            seen.view(torch.int32),
            M,
            K,
            eps,
        ),
        device=x.device,
        ADD=delta is not None,
        OUTPUT=output.value,
        FACTOR=2.0**margin,
        E5M2=dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        NATIVE=launch.target_of(x.device).native_cast,
        **_norm_block(K),
    )
    return rstd


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.rms_norm`; x [M, K] row-major."""
    y = torch.empty_like(x)
    return y, _rms_norm(x, weight, eps, y, PLAIN)


def rms_norm_amax(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.rms_norm_amax`; x [M, K] row-major."""
    y, seen = torch.empty_like(x), launch.zero(x.device)
    return y, _rms_norm(x, weight, eps, y, AMAX, seen=seen), seen


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.add_rms_norm`; x and delta [M, K] row-major."""
    total, y = torch.empty_like(x), torch.empty_like(x)
    return total, y, _rms_norm(x, weight, eps, y, PLAIN, delta=delta, total=total)


def add_rms_norm_amax(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.add_rms_norm_amax`; x and delta [M, K] row-major."""
    total, y, seen = torch.empty_like(x), torch.empty_like(x), launch.zero(x.device)
    return total, y, _rms_norm(x, weight, eps, y, AMAX, delta=delta, total=total, seen=seen), seen


def rms_norm_cast_delayed(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.rms_norm_cast_delayed`; x [M, K] row-major."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_inv, seen = launch.zero(x.device), launch.zero(x.device)
    rstd = _rms_norm(
        *(x, weight, eps, codes.view(torch.uint8), DELAYED),
        amax=amax,
        scale_inv=scale_inv,
        seen=seen,
        dtype=dtype,
        power_of_two=power_of_two,
        margin=margin,
    )
    return codes, rstd, scale_inv, seen


def rms_norm_cast_rowwise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.rms_norm_cast_rowwise`; x [M, K] row-major."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_inv = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    rstd = _rms_norm(
        *(x, weight, eps, codes.view(torch.uint8), ROWWISE),
        scale_inv=scale_inv,
        dtype=dtype,
        power_of_two=power_of_two,
    )
    return codes, rstd, scale_inv


def rms_norm_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.rms_norm_backward`; grad_y and x [M, K] row-major."""
    return _rms_norm_backward(grad_y, None, x, weight, rstd)


def add_rms_norm_backward(
    grad_y: torch.Tensor,
    grad_sum: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.add_rms_norm_backward`; grad_y, grad_sum and total [M, K] row-major."""
    return _rms_norm_backward(grad_y, grad_sum, total, weight, rstd)


def _rms_norm_backward(
    grad_y: torch.Tensor,
    grad_sum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    M, K = x.shape
    grad_x, amax = torch.empty_like(x), launch.zero(x.device)
    grid = launch.persistent_grid(x.shape[0], x.device)
    partial = torch.empty((grid[0], K), dtype=torch.float32, device=x.device)
    launch.launch(
        _rms_norm_backward_kernel,
        grid,
        *(grad_y, grad_y if grad_sum is None else grad_sum, x, weight, rstd, grad_x, partial),
        *(amax.view(torch.int32), M, K),
        device=x.device,
        ADD=grad_sum is not None,
        NATIVE=launch.target_of(x.device).native_cast,
        **_norm_block(K),
    )
    return grad_x, partial.sum(0).to(weight.dtype), amax
