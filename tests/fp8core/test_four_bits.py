"""four_bits, philox: each code, tie and scale against ml_dtypes and float64; Random123's published vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fp8core import four_bits, philox
from fp8core.formats import E2M1FN, Format
from fp8core.scaling import Granularity, MxMode

ml_dtypes = pytest.importorskip("ml_dtypes")
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # MX 1.0, section 5.3.3


@dataclass(frozen=True)
class Cast:
    granularity: Granularity = "1x16"
    rounding: str = "nearest"
    hadamard: tuple[int, ...] | None = None
    mx_mode: MxMode = "rceil"
    format: Format = E2M1FN


def hard_float32() -> torch.Tensor:
    """Every value and midpoint of e2m1 with both float32 neighbours and both signs; all bfloat16 numbers; special values."""
    grid = torch.tensor(VALUES)
    exact = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([7.0, 1e-45, 3e38, torch.inf])])
    exact = torch.cat([exact, -exact])
    bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    infinity = torch.tensor(torch.inf)
    return torch.cat([exact, exact.nextafter(infinity), exact.nextafter(-infinity), bf16[~bf16.isnan()]])


def test_every_code_and_tie_is_that_of_ml_dtypes() -> None:
    """Oracle: ml_dtypes.float4_e2m1fn of the clipped input, the sign of zero included; its values of all 16 codes."""
    x = hard_float32()
    want = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(four_bits.encode(x).numpy(), want & 15)
    codes = torch.arange(16, dtype=torch.uint8)
    values = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(four_bits.decode(codes).numpy().view(np.int32), values.view(np.int32))
    assert four_bits.encode(torch.tensor([torch.nan])) & 7 == 0


def test_packing_has_the_even_element_in_the_low_bits() -> None:
    """Oracle: torch's Float4_e2m1fn_x2.h, "val1 : val0" from bit 7 down; packing and its inverse over all 256 bytes."""
    assert four_bits.pack(torch.tensor([[2, 15]], dtype=torch.uint8)).item() == 0xF2
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert torch.equal(four_bits.pack(four_bits.unpack(every)), every)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_has_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]
) -> None:
    """Oracle: Random123's `kat_vectors`, its three lines of philox4x32 10."""
    made = philox.words(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in made) == want


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("granularity", ["1x16", "16x16", "1x32"])
def test_a_cast_comes_back_within_half_a_step(granularity: Granularity, dim: int) -> None:
    """Oracle: the widest gap of e2m1 below 6 is 2, and a scale that e4m3 rounds down by 1/16 saturates by as much: an error
    of at most a fifth of the block's amax."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    operand = four_bits.quantize_lines(x, Cast(granularity), dim)
    lines = x if dim else x.t()
    assert operand.qdata.shape == (lines.shape[0], lines.shape[1] // 2)
    block = 32 if granularity == "1x32" else 16
    assert operand.scale_inv.shape == (lines.shape[0], lines.shape[1] // block)
    error = (four_bits.dequantize(operand) - lines).abs().unflatten(1, (-1, block))
    largest = lines.abs().unflatten(1, (-1, block)).amax(2, keepdim=True)
    if granularity == "16x16":
        largest = largest.unflatten(0, (-1, 16)).amax(1, keepdim=True).expand(-1, 16, -1, -1).flatten(0, 1)
    assert (error <= largest / 5).all()


def test_the_transform_is_orthogonal_and_keeps_a_product() -> None:
    """Oracle: the product of the operands in float64."""
    x, y = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).unbind()
    got = (
        four_bits.hadamard(x, 1, four_bits.SIGNS).double()
        @ four_bits.hadamard(y.t(), 0, four_bits.SIGNS).double()
    )
    torch.testing.assert_close(got, x.double() @ y.double().t(), rtol=0, atol=1e-5)
