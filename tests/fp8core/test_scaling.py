"""scaling: amax and scale against exact arithmetic, with one rule for each special group."""

from __future__ import annotations

import pytest
import torch

from fp8core.formats import ELEMENT_FORMATS, Format
from fp8core.scaling import compute_scale

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


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
