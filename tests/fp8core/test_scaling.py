"""scaling: amax and scale against exact arithmetic, with one rule for each special group."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fp8core.formats import ELEMENT_FORMATS, Format
from fp8core.scaling import AMAX_FLOOR, amax, compute_scale, mx_scale_code

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


def nearest_float32(quotient: Fraction) -> float:
    """The float32 nearest to an exact rational: candidates around its float64 value, compared exactly."""
    centre = np.float32(float(quotient))
    candidates = [centre, np.nextafter(centre, np.float32(0)), np.nextafter(centre, np.float32(np.inf))]
    return float(min(candidates, key=lambda c: abs(Fraction(float(c)) - quotient)))


AMAXES = hypothesis.given(
    value=st.floats(min_value=2.0**-36, max_value=2.0**127, width=32), fmt=st.sampled_from(ELEMENT_FORMATS)
)
OFTEN = hypothesis.settings(max_examples=300, deadline=None)


@AMAXES
@OFTEN
def test_scale_is_the_correctly_rounded_quotient(value: float, fmt: Format) -> None:
    """Oracle: exact rational arithmetic. Double rounding (float64, then float32) may only differ at a tie."""
    scale, scale_inv = compute_scale(torch.tensor(value), fmt)
    assert scale.item() == nearest_float32(Fraction(fmt.max) / Fraction(value))
    assert scale_inv.item() == nearest_float32(1 / Fraction(scale.item()))


@AMAXES
@OFTEN
def test_power_of_two_scale_is_the_largest_one_below(value: float, fmt: Format) -> None:
    """Oracle: math.frexp. amax then meets no more than the largest value, and more than half of it."""
    exact = compute_scale(torch.tensor(value), fmt)[0].item()
    scale, scale_inv = compute_scale(torch.tensor(value), fmt, power_of_two=True)
    assert scale.item() == 2.0 ** (math.frexp(exact)[1] - 1)
    assert scale.item() * scale_inv.item() == 1.0
    assert fmt.max / 2 * (1 - 2**-22) < value * scale.item() <= fmt.max * (1 + 2**-23)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
def test_a_compilers_scales_have_the_same_bits(fmt: Format, pow2: bool) -> None:
    """Oracle: the quotient in float64. One of 1,009 of all non-negative float32; the whole of them was equal on 2026-11-28."""
    amaxes = torch.arange(0, 2**31, 1009).int().view(torch.float32)
    torch.compiler.reset()  # or the last of the formats would meet the limit of recompilations
    traced = torch.compile(compute_scale, backend="eager", fullgraph=True)
    for ours, theirs in zip(
        compute_scale(amaxes, fmt, pow2), traced(amaxes, fmt, power_of_two=pow2), strict=True
    ):
        assert torch.equal(ours.nan_to_num(-1, torch.inf), theirs.nan_to_num(-1, torch.inf))


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
def test_special_amax(fmt: Format, pow2: bool) -> None:
    """Oracle: the written rules (docs/numerics.md, section 3)."""
    scale, scale_inv = compute_scale(torch.tensor([0.0, 1e-30, torch.inf, torch.nan]), fmt, pow2)
    assert compute_scale(torch.tensor(-0.0), fmt, pow2)[0] == scale[0]
    at_floor = compute_scale(torch.tensor(AMAX_FLOOR), fmt, pow2)
    assert scale[0] == scale[1] == at_floor[0]
    assert scale[0].isfinite()
    assert (scale[2].item(), scale_inv[2].item()) == (0.0, math.inf)
    assert scale[3].isnan()
    assert scale_inv[3].isnan()


def test_amax_of_non_finite_and_empty_groups() -> None:
    """Oracle: the written rules: NaN beats Inf beats numbers; nothing has amax 0."""
    x = torch.tensor([[1.0, -torch.inf, torch.nan], [1.0, -torch.inf, 0.0], [-3.0, 2.0, -0.0]])
    assert amax(x).isnan()
    got = amax(x, "rowwise", 1).flatten()
    assert got[0].isnan()
    assert got[1:].tolist() == [math.inf, 3.0]
    assert amax(torch.zeros(0, 4)).item() == 0
    assert amax(torch.zeros(0, 4), "rowwise", 0).tolist() == [[0.0] * 4]
    assert amax(torch.zeros(3, 0), "rowwise", 1).tolist() == [[0.0]] * 3


def test_an_mx_block_with_a_nan_is_nan_whatever_its_sign() -> None:
    """Oracle: the rule itself, code 255; 0xFFC00000 is the NaN that x86 makes."""
    for bits in (0x7FC00000, -0x400000):
        amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert mx_scale_code(amax, "e4m3fn").view(torch.uint8).item() == 255
