"""scaling: scales of compiled code, and one rule for each special group."""

from __future__ import annotations

import math

import pytest
import torch

from fp8core.formats import ELEMENT_FORMATS, Format
from fp8core.scaling import AMAX_FLOOR, compute_scale


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda f: f.name)
def test_a_compilers_scales_have_the_same_bits(fmt: Format, pow2: bool) -> None:
    """Oracle: eager mode, which test_either_device.py holds against the true quotient. One of 1,009 of all non-negative float32; the whole of them was equal on 2026-11-28."""
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
