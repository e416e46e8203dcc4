"""Blocks: 1x128, 128x128 and MX scales, from amax to the GEMM of each recipe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from fp8core import E4M3FN, E5M2
from fp8core.cast import scale_and_cast
from fp8core.recipe import MX_MODES
from fp8core.scaling import amax, mx_scale, mx_scale_code

if TYPE_CHECKING:
    from fp8core.formats import Format

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")

SHAPES = [(1, 1), (16, 128), (130, 257), (5, 31), (128, 33), (0, 40), (40, 0)]


def blocks(x: torch.Tensor, rows: int, columns: int) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Index of each block, and where it lies."""
    M, K = x.shape
    return [
        ((i, j), (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)))
        for i in range(-(-M // rows))
        for j in range(-(-K // columns))
    ]


SIZES = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", SIZES)
def test_amax_and_codes_of_every_block(granularity: str, shape: tuple[int, int]) -> None:
    """Oracle: a Python loop over the blocks, each cast by itself with one scale; along the other dimension, the transpose."""
    x = torch.randn(*shape) * torch.logspace(-3, 3, max(shape[0], 1))[: shape[0], None]
    got = amax(x, granularity, 1)
    codes, scale_inv = scale_and_cast(x, E4M3FN, granularity, dim=1)
    assert got.shape == scale_inv.shape
    for index, where in blocks(x, *SIZES[granularity]):
        part = x[where]
        assert got[index] == part.abs().max()
        if granularity == "1x32":
            scale = mx_scale(mx_scale_code(part.abs().max(), E4M3FN))
            own = (part * scale).clamp(-448, 448).to(E4M3FN.dtype)
        else:
            own, own_inv = scale_and_cast(part, E4M3FN)
            assert own_inv == scale_inv[index]
        assert torch.equal(codes[where].view(torch.uint8), own.view(torch.uint8))
    codes_t, scale_inv_t = scale_and_cast(x.t(), E4M3FN, granularity, dim=0)
    assert torch.equal(codes_t.t().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale_inv_t.t().float(), scale_inv.float())


# ---------------------------------------------------------------- E8M0 scales


def every_amax() -> torch.Tensor:
    """All positive bfloat16, and every float32 within 2 ulp of c * 2**k for the c at which a mode decides."""
    bf16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    decisive = torch.tensor([1.0, 1.75, 1.875, 1.9375, 1.5])
    near = torch.cat([decisive * 2.0**k for k in range(-120, 120, 7)]).view(torch.int32)[
        :, None
    ] + torch.arange(-2, 3)
    return torch.cat([bf16, near.int().flatten().view(torch.float32)])


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("mode", MX_MODES)
def test_mx_codes_by_exact_arithmetic(mode: str, fmt: Format) -> None:
    """Oracle: frexp of float64, where every step of each definition is exact."""
    x = every_amax()
    m, e = torch.frexp(x.double())  # x = m * 2**e, m in [0.5, 1)
    _rounded_m, rounded_e = torch.frexp(torch.floor(m * 2 ** (fmt.mantissa_bits + 1) + 0.5))
    exponent = {
        "floor": e - 1,
        "ceil": e - (m == 0.5).int(),
        "rceil": e - (m <= fmt.max / 2.0 ** (fmt.emax + 1)).int(),
        "even": e + rounded_e - (fmt.mantissa_bits + 1) - 1,
    }[mode]
    normal = x >= 2.0**-126  # the exponent field of a subnormal says less; its code is 0 either way
    want = torch.where(normal, (exponent - fmt.emax + 127).clamp(0, 254), 0)
    assert torch.equal(mx_scale_code(x, fmt, mode).view(torch.uint8).int(), want.int())


def test_mx_special_amaxes() -> None:
    special = torch.tensor([0.0, 1e-45, 2.0**-119, torch.inf, torch.nan, 3.4e38])
    for mode in MX_MODES:
        code = mx_scale_code(special, E4M3FN, mode).view(torch.uint8).tolist()
        assert code[:2] == [0, 0]
        assert code[3:5] == [255, 255]
        assert code[5] in (246, 247)
    every = torch.arange(256, dtype=torch.uint8)
    scales = mx_scale(every.view(torch.float8_e8m0fnu)).double()
    assert scales[255].isnan()
    assert torch.equal(scales[:255], 2.0 ** (127 - every[:255].double()))


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_mx_cast_equals_torchao(fmt: Format, mode: str) -> None:
    """Oracle: torchao.prototype.mx_formats.to_mx: scales and codes, bitwise, on rows of every size."""
    to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = (torch.randn(64, 128) * torch.logspace(-6, 6, 64)[:, None]).bfloat16().float()
    their_mode = getattr(to_mx.ScaleCalculationMode, mode.upper())
    theirs_scale, theirs = to_mx.to_mx(x, fmt.dtype, 32, their_mode)
    codes, scale = scale_and_cast(x, fmt, "1x32", dim=1, mx_mode=mode)
    assert torch.equal(scale.view(torch.uint8), theirs_scale.view(torch.uint8).reshape(scale.shape))
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
