"""MX: blocks of 32 elements with an E8M0 scale, a bare power of two stored as its biased exponent.

    X    = 2**e                                   the decoding scale, stored as the code e + 127
    code = RNE(clamp(x / X, -fp8_max, +fp8_max))

e from the amax of the block, emax = 8 (E4M3) or 15 (E5M2):

    floor   floor(log2(amax)) - emax              OCP MX 1.0; saturates amax of significand above 1.75
    ceil    ceil(log2(amax)) - emax
    rceil   ceil(log2(amax / fp8_max))            NVIDIA's; the smallest X that saturates nothing
    even    floor(log2(amax rounded to the element's mantissa)) - emax

All by integer arithmetic on the float32 bits of amax: no logarithm, and no conversion to E8M0, which PyTorch
rounds. Division by a power of two is exact, so x / X is x times 2**-e. An amax of 0 (or too small) takes code
0, X = 2**-127. Inf or NaN in a block takes code 255, NaN, and all its elements come back as NaN (as torchao
after 0.18; 0.18 itself saturates Inf).

Source: OCP Microscaling Formats (MX) 1.0, sections 5.1 and 6.3. Bytes an element (bfloat16): one layout
2 + 1 + 1/32, both layouts 2 + 2 * (1 + 1/32).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch
from fp8core.kernels.encode import (
    E4M3_EMAX,
    E5M2_EMAX,
    INFINITE_BITS,
    MANTISSA_OF_MAX,
    encode,
    magnitude_bits,
    widen,
)
from fp8core.scaling import MX_BLOCK, MX_MODES

TILE_M, TILE_K = 64, 128
MODES: dict[str, int] = {name: number for number, name in enumerate(MX_MODES)}
FLOOR, CEIL, RCEIL, EVEN = (tl.constexpr(MODES[name]) for name in ("floor", "ceil", "rceil", "even"))


@triton.jit
def e8m0_code(amax_bits, E5M2: tl.constexpr, MODE: tl.constexpr):
    """int32 float32-bits of amax -> E8M0 code as int32."""
    EMAX: tl.constexpr = E5M2_EMAX if E5M2 else E4M3_EMAX
    MANTISSA_BITS: tl.constexpr = 2 if E5M2 else 3
    mantissa = amax_bits & 0x7FFFFF
    if MODE == FLOOR:
        exponent = amax_bits >> 23
    elif MODE == CEIL:
        exponent = (amax_bits >> 23) + (mantissa != 0).to(tl.int32)
    elif MODE == RCEIL:
        exponent = (amax_bits >> 23) + (mantissa > MANTISSA_OF_MAX).to(tl.int32)
    else:
        exponent = (tl.minimum(amax_bits, INFINITE_BITS) + (1 << (22 - MANTISSA_BITS))) >> 23
    # A subnormal amax has exponent field 0 whatever its logarithm; either way the code is clamped to 0.
    return tl.where(amax_bits >= INFINITE_BITS, 255, tl.maximum(exponent - EMAX, 0))


@triton.jit
def inverse_of_e8m0(code):
    """2**(127 - code) as float32, exact for codes 0..253 (all that `e8m0_code` yields); NaN for 255."""
    return tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _cast_mx_kernel(
    x_ptr,
    codes_ptr,
    codes_t_ptr,
    scales_ptr,
    scales_t_ptr,
    M,
    K,
    MODE: tl.constexpr,
    BOTH: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    GROUPS_M: tl.constexpr = BLOCK_M // GROUP
    GROUPS_K: tl.constexpr = BLOCK_K // GROUP
    tiles_k = tl.cdiv(K, BLOCK_K)
    groups_m, groups_k = tl.cdiv(M, GROUP), tl.cdiv(K, GROUP)
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    keep = (m[:, None] < M) & (k[None, :] < K)
    at = m.to(tl.int64)[:, None] * K + k[None, :]
    x = tl.load(x_ptr + at, mask=keep, other=0.0)
    bits = magnitude_bits(x)
    wide = widen(x)

    scales = e8m0_code(tl.max(bits.reshape(BLOCK_M, GROUPS_K, GROUP), 2), E5M2, MODE)
    by = inverse_of_e8m0(scales)[:, :, None]
    codes = encode((wide.reshape(BLOCK_M, GROUPS_K, GROUP) * by).reshape(BLOCK_M, BLOCK_K), E5M2, NATIVE)
    tl.store(codes_ptr + at, codes, mask=keep)
    g = tile_k * GROUPS_K + tl.arange(0, GROUPS_K)
    scales_at = m.to(tl.int64)[:, None] * groups_k + g[None, :]
    tl.store(scales_ptr + scales_at, scales.to(tl.uint8), mask=(m[:, None] < M) & (g[None, :] < groups_k))

    if BOTH:
        scales_t = e8m0_code(tl.max(bits.reshape(GROUPS_M, GROUP, BLOCK_K), 1), E5M2, MODE)
        by_t = inverse_of_e8m0(scales_t)[:, None, :]
        codes_t = encode(
            (wide.reshape(GROUPS_M, GROUP, BLOCK_K) * by_t).reshape(BLOCK_M, BLOCK_K), E5M2, NATIVE
        )
        at_t = k.to(tl.int64)[:, None] * M + m[None, :]
        tl.store(codes_t_ptr + at_t, tl.trans(codes_t), mask=(k[:, None] < K) & (m[None, :] < M))
        g_t = tile_m * GROUPS_M + tl.arange(0, GROUPS_M)
        scales_t_at = k.to(tl.int64)[:, None] * groups_m + g_t[None, :]
        keep_scales_t = (k[:, None] < K) & (g_t[None, :] < groups_m)
        tl.store(scales_t_ptr + scales_t_at, tl.trans(scales_t).to(tl.uint8), mask=keep_scales_t)


def cast_mx(x: torch.Tensor, dtype: torch.dtype, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_mx`; x [M, K] row-major."""
    return _launch(x, dtype, mode, both=False)[:2]


def cast_mx_both(
    x: torch.Tensor, dtype: torch.dtype, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of `reference.cast_mx_both`; x [M, K] row-major."""
    return _launch(x, dtype, mode, both=True)


def _launch(
    x: torch.Tensor, dtype: torch.dtype, mode: str, both: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if mode not in MODES:
        raise ValueError(f"MX scale mode {mode!r} is unknown; expected one of {', '.join(MODES)}")
    M, K = x.shape
    codes = torch.empty((M, K), dtype=dtype, device=x.device)
    codes_t = torch.empty((K, M) if both else (0, 0), dtype=dtype, device=x.device)
    scales = torch.empty((M, launch.ceil_div(K, MX_BLOCK)), dtype=torch.uint8, device=x.device)
    scales_t = torch.empty(
        (K, launch.ceil_div(M, MX_BLOCK)) if both else (0, 0), dtype=torch.uint8, device=x.device
    )
    launch.launch(
        _cast_mx_kernel,
        (launch.ceil_div(M, TILE_M) * launch.ceil_div(K, TILE_K),),
        x,
        codes.view(torch.uint8),
        codes_t.view(torch.uint8),
        scales,
        scales_t,
        M,
        K,
        device=x.device,
        MODE=MODES[mode],
        BOTH=both,
        E5M2=dtype == torch.float8_e5m2,
        NATIVE=launch.target_of(x.device).native_cast,
        GROUP=MX_BLOCK,
        BLOCK_M=TILE_M,
        BLOCK_K=TILE_K,
    )
    e8m0 = torch.float8_e8m0fnu
    return codes, scales.view(e8m0), codes_t, scales_t.view(e8m0)
