"""RMSNorm that writes codes as they are and transposed by an earlier step's amax, and no high-precision result.

A program takes `BLOCK_M` whole rows in two walks over their columns: the first sums squares (and with ADD stores
sum = x + delta), the second reads the rows again, norms and encodes them. A row of codes has K bytes and a column of a
block `BLOCK_M`, so that both stores leave in runs of 16 bytes or more; one row alone, as `norm` holds it, would store its
transposed codes as single bytes.

The second walk finds the rows in the second-level cache: there is one program a processor, and what all of them walk over
is processors x BLOCK_M x K x 2 bytes, 35 MB for K = 4096 on 132 processors with a cache of 50 MB. `traffic` counts that
read all the same. Bytes an element (bfloat16): 2 + 2 + 1 + 1, with ADD 2 + 2 + 2 + 2 + 1 + 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import encode, leave_amax, magnitude_bits, narrow, tensor_scale, widen

TILE = {"BLOCK_M": 32, "BLOCK_K": 256, "num_warps": 16}


@triton.jit
def _rms_norm_cast_both_kernel(
    x_ptr,
    delta_ptr,  # with ADD
    sum_ptr,  # with ADD, else x
    weight_ptr,
    codes_ptr,
    codes_t_ptr,
    rstd_ptr,
    amax_ptr,
    scale_inv_bits_ptr,
    seen_bits_ptr,
    M,
    K,
    eps,
    ADD: tl.constexpr,
    FACTOR: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    scale = tensor_scale(amax_ptr, scale_inv_bits_ptr, FACTOR, True, E5M2, POWER_OF_TWO)
    largest = tl.zeros((BLOCK_M,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row = m.to(tl.int64)[:, None] * K
        squares = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at, keep = row + k[None, :], (m[:, None] < M) & (k[None, :] < K)
            x = widen(tl.load(x_ptr + at, mask=keep, other=0.0))
            if ADD:
                delta = widen(tl.load(delta_ptr + at, mask=keep, other=0.0))
                total = narrow(x + delta, x_ptr.dtype.element_ty, NATIVE)
                tl.store(sum_ptr + at, total, mask=keep)
                x = widen(total)
            squares += tl.sum(x * x, 1)
        rstd = tl.rsqrt(squares / K + eps)
        tl.store(rstd_ptr + m, rstd, mask=m < M)
        if ADD:
            tl.debug_barrier()  # a thread may read what another one of this program has stored
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at, keep = row + k[None, :], (m[:, None] < M) & (k[None, :] < K)
            weight = widen(tl.load(weight_ptr + k, mask=k < K, other=0.0))
            x = widen(tl.load(sum_ptr + at, mask=keep, other=0.0))
            y = narrow(x * rstd[:, None] * weight[None, :], x_ptr.dtype.element_ty, NATIVE)
            largest = tl.maximum(largest, tl.max(magnitude_bits(y), 1))
            codes = encode(widen(y) * scale, E5M2, NATIVE)
            tl.store(codes_ptr + at, codes, mask=keep)
            at_t = k.to(tl.int64)[:, None] * M + m[None, :]
            tl.store(codes_t_ptr + at_t, tl.trans(codes), mask=(k[:, None] < K) & (m[None, :] < M))
    leave_amax(tl.max(largest, 0), seen_bits_ptr, scale_inv_bits_ptr)


def rms_norm_cast_delayed_both(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.rms_norm_cast_delayed_both`; x [M, K] row-major."""
    return _cast_both(x, None, x, weight, eps, amax, dtype, power_of_two, margin)


def add_rms_norm_cast_delayed_both(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.add_rms_norm_cast_delayed_both`; x and delta [M, K] row-major."""
    total = torch.empty_like(x)
    return total, *_cast_both(x, delta, total, weight, eps, amax, dtype, power_of_two, margin)


def _cast_both(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    M, K = x.shape
    codes = torch.empty((M, K), dtype=dtype, device=x.device)
    codes_t = torch.empty((K, M), dtype=dtype, device=x.device)
    rstd = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    scale_inv, seen = launch.zero(x.device), launch.zero(x.device)
    target = launch.target_of(x.device)
    launch.launch(
        _rms_norm_cast_both_kernel,
        (min(launch.ceil_div(M, TILE["BLOCK_M"]), target.processors),),
        *(
            x,
            x if delta is None else delta,
            total,
            weight,
            codes.view(torch.uint8),
            codes_t.view(torch.uint8),
        ),
        *(rstd, amax, scale_inv.view(torch.int32), seen.view(torch.int32), M, K, eps),
        device=x.device,
        ADD=delta is not None,
        FACTOR=2.0**margin,
        E5M2=dtype == torch.float8_e5m2,
        POWER_OF_TWO=power_of_two,
        NATIVE=target.native_cast,
        **TILE,
    )
    return codes, codes_t, rstd, scale_inv, seen
