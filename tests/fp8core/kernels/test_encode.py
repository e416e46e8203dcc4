"""encode: the arithmetic inside the kernels, against the plain reference, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl

from fp8core import cast, scaling
from fp8core.formats import E4M3FN, E5M2, Format
from fp8core.kernels import launch
from fp8core.kernels.encode import encode, magnitude_bits, narrow, reciprocal, scale_of, widen

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)


@triton.jit
def encode_kernel(x_ptr, codes_ptr, numel, E5M2: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = widen(tl.load(x_ptr + at, mask=at < numel, other=0.0))
    tl.store(codes_ptr + at, encode(x, E5M2, NATIVE), mask=at < numel)


@triton.jit
def scale_kernel(
    amax_ptr,
    scale_ptr,
    inverse_ptr,
    numel,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = scale_of(tl.load(amax_ptr + at, mask=at < numel, other=1.0), E5M2, POWER_OF_TWO)
    tl.store(scale_ptr + at, scale, mask=at < numel)
    tl.store(inverse_ptr + at, reciprocal(scale), mask=at < numel)


@triton.jit
def narrow_kernel(x_ptr, y_ptr, bits_ptr, numel, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = narrow(tl.load(x_ptr + at, mask=at < numel, other=0.0), y_ptr.dtype.element_ty, NATIVE)
    tl.store(y_ptr + at, y, mask=at < numel)
    tl.store(bits_ptr + at, magnitude_bits(y), mask=at < numel)


def run(kernel: Any, x: torch.Tensor, *outputs: torch.Tensor, **constants: Any) -> None:
    grid = (launch.ceil_div(x.numel(), 16384),)
    launch.launch(kernel, grid, x, *outputs, x.numel(), device=x.device, BLOCK=16384, **constants)


@FORMATS
def test_codes(
    fmt: Format,
    all_bf16: torch.Tensor,
    device: torch.device,
    same_bytes: Callable[..., None],
    hard_float32: torch.Tensor,
) -> None:
    """Oracle: `cast_saturating`. All bfloat16, all ties and neighbours, every subnormal, random float32 bits; with the
    bit encoder everywhere and with the native one where there is one."""
    for x in (all_bf16, all_bf16.view(-1)[:1000].half(), hard_float32):
        for native in {False, launch.target_of(device).native_cast}:
            codes = torch.full(x.shape, 0xAA, dtype=torch.uint8, device=device)
            run(encode_kernel, x.to(device), codes, E5M2=fmt is E5M2, NATIVE=native)
            same_bytes(codes.view(fmt.dtype), cast.cast_saturating(x, fmt))


@FORMATS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales(
    fmt: Format,
    power_of_two: bool,
    all_bf16: torch.Tensor,
    device: torch.device,
    same_bytes: Callable[..., None],
) -> None:
    """Oracle: `compute_scale`, which divides in float64. All bfloat16 amax, 2**16 float32, both sides of the floor and
    of the values where a rounded logarithm would go wrong."""
    random = torch.randint(0, 0x7F80_0001, (2**16,), dtype=torch.int32).view(torch.float32)
    edges = torch.tensor([scaling.AMAX_FLOOR, 7.0, 14.0, 3.5, 448.0, 57344.0, 1e-30, 3.4e38])
    around = [torch.nextafter(edges, torch.tensor(limit)) for limit in (0.0, float("inf"))]
    amax = torch.cat([all_bf16.float().abs().view(-1), random, edges, *around])
    got = tuple(torch.full_like(amax, torch.nan, device=device) for _ in range(2))
    run(scale_kernel, amax.to(device), *got, E5M2=fmt is E5M2, POWER_OF_TWO=power_of_two)
    same_bytes(got, scaling.compute_scale(amax, fmt, power_of_two))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_to_high_precision(
    dtype: torch.dtype,
    device: torch.device,
    same_bytes: Callable[..., None],
    hard_float32: torch.Tensor,
) -> None:
    """Oracle: `Tensor.to`, and |y| seen as integers."""
    x = torch.cat([hard_float32, torch.tensor([1.00390625, 1.01171875, 65519.0, 65520.0])])
    y = torch.empty(x.shape, dtype=dtype, device=device)
    bits = torch.empty(x.shape, dtype=torch.int32, device=device)
    run(narrow_kernel, x.to(device), y, bits, NATIVE=launch.target_of(device).native_cast)
    want = x.to(dtype)
    same_bytes((y, bits.view(torch.float32)), (want, want.float().abs()))
