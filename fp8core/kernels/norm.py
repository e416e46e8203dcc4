"""RMSNorm that leaves an amax behind: the producer reads and writes anyway.

Each form also comes with the addition before it, sum = x + delta, rounded to the input's dtype: one read of each and no
read of the sum. Its backward pass adds the gradients of sum and norm before it rounds.

In two forms with the same arithmetic: plain, for the bfloat16 arm of a comparison; and with the amax of its result,
which spares a dynamic cast its first pass (6 bytes an element become 4). Sums are float32.

A whole row is held in one program, up to `MAX_COLUMNS`; programs walk over rows, so that there is one atomic for
each program.

Source: Zhang and Sennrich 2019, arXiv 1910.07467.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import magnitude_bits, narrow, widen

MAX_COLUMNS = 65536


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,  # with ADD
    sum_ptr,  # with ADD
    weight_ptr,
    y_ptr,
    rstd_ptr,
    amax_bits_ptr,  # with WITH_AMAX
    M,
    K,
    eps,
    ADD: tl.constexpr,
    WITH_AMAX: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
    largest = tl.zeros((BLOCK_K,), tl.int32)
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
        tl.store(y_ptr + at, y, mask=k < K)
        if WITH_AMAX:
            largest = tl.maximum(largest, magnitude_bits(y))
    if WITH_AMAX:
        tl.atomic_max(amax_bits_ptr, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _rms_norm_backward_kernel(
    grad_y_ptr,
    grad_sum_ptr,  # with ADD
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_ptr,  # float32 [programs, K]: each program's sum of grad_weight
    M,
    K,
    ADD: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
    grad_weight = tl.zeros((BLOCK_K,), tl.float32)
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
        grad_weight += grad_y * n
    tl.store(partial_ptr + tl.program_id(0) * K + k, grad_weight, mask=k < K)


def _norm_block(K: int) -> dict[str, int]:
    if K > MAX_COLUMNS:
        raise ValueError(f"the norm kernels hold rows of up to {MAX_COLUMNS} columns on chip, not {K}")
    block = launch.next_power_of_two(K)
    return {"BLOCK_K": block, "num_warps": min(max(block // 512, 4), 16)}


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    delta: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum of x and delta, or x; y; rstd); raises `seen` to the amax of y."""
    M, K = x.shape
    y, rstd = torch.empty_like(x), torch.empty((M, 1), dtype=torch.float32, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    launch.launch(
        _rms_norm_kernel,
        launch.persistent_grid(M, x.device),
        *(x, x if delta is None else delta, total, weight, y, rstd),
        *(
            rstd.view(torch.int32) if seen is None else seen.view(torch.int32),
            M,
            K,
            eps,
        ),  # rstd: never touched
        device=x.device,
        ADD=delta is not None,
        WITH_AMAX=seen is not None,
        NATIVE=launch.target_of(x.device).native_cast,
        **_norm_block(K),
    )
    return total, y, rstd


def rms_norm(x: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.rms_norm`; x [M, K] row-major."""
    return _rms_norm(x, *norm)[1:]


def rms_norm_amax(x: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.rms_norm_amax`; x [M, K] row-major."""
    seen = launch.zero(x.device)
    return *_rms_norm(x, *norm, seen=seen)[1:], seen


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.add_rms_norm`; x and delta [M, K] row-major."""
    return _rms_norm(x, *norm, delta=delta)


def add_rms_norm_amax(x: torch.Tensor, delta: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.add_rms_norm_amax`; x and delta [M, K] row-major."""
    seen = launch.zero(x.device)
    return *_rms_norm(x, *norm, delta=delta, seen=seen), seen


def rms_norm_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.rms_norm_backward`; grad_y and x [M, K] row-major."""
    return add_rms_norm_backward(grad_y, None, x, weight, rstd)


def add_rms_norm_backward(
    grad_y: torch.Tensor,
    grad_sum: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.add_rms_norm_backward`; grad_y, grad_sum and total [M, K] row-major."""
    M, K = total.shape
    grad = torch.empty_like(total)
    grid = launch.persistent_grid(M, total.device)
    partial = torch.empty((grid[0], K), dtype=torch.float32, device=total.device)
    launch.launch(
        _rms_norm_backward_kernel,
        grid,
        *(grad_y, grad_y if grad_sum is None else grad_sum, total, weight, rstd, grad, partial, M, K),
        device=total.device,
        ADD=grad_sum is not None,
        NATIVE=launch.target_of(total.device).native_cast,
        **_norm_block(K),
    )
    return grad, partial.sum(0).to(weight.dtype)
