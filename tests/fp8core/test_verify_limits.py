"""Limits of `fp8core.verify` themselves. Oracles: block sizes of the formats; rows moved by a known distance in decibels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp8core.recipe import RECIPES
from fp8core.verify.oracle import Quantized, block_of
from fp8core.verify.products import Side, decibels, difference


@pytest.mark.parametrize(
    ("granularity", "along", "across"),
    [("tensorwise", 0, 0), ("rowwise", 0, 1), ("1x128", 128, 1), ("128x128", 128, 128), ("1x32", 32, 1)],
)
def test_a_block_is_that_of_its_format(granularity: str, along: int, across: int) -> None:
    """DeepSeek-V3 (arXiv:2412.19437) has 1x128 and 128x128, OCP MX 1.0 has 32."""
    cast = replace(RECIPES["rowwise"].output.a, granularity=granularity)
    assert block_of(cast, 1) == (across, along)
    assert block_of(cast, 0) == (along, across)


@pytest.mark.parametrize(("apart_db", "beyond"), [(30.0, 0), (26.0, 0), (24.0, 1), (20.0, 1)])
def test_a_row_on_a_gpu_may_be_25_db_away_and_no_further(apart_db: float, beyond: int) -> None:
    """One row of the result is moved by a vector of a known length; the others are exact."""
    a, b = torch.randn(16, 64), torch.randn(32, 64)
    result = a.double() @ b.double().t()
    push = torch.randn(32, dtype=torch.float64)
    result[3] += push * (10 ** (-apart_db / 20) * result[3].norm() / push.norm())
    sides = [Side(Quantized.of(x, None, 1), 1) for x in (a, b)]
    assert difference(*sides, result, 2.0**-9, exact=False).beyond == beyond


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (100.0, 1.0, 20.0),
        (1.0, 0.0, math.inf),
        (0.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (math.nan, 1.0, math.nan),
        (math.nan, 0.0, math.nan),
        (1.0, math.nan, math.nan),
        (0.0, math.nan, math.nan),
        (math.nan, math.nan, math.nan),
    ],
)
def test_decibels_of_what_is_no_number_are_none(signal: float, noise: float, expected: float) -> None:
    """Oracle: the definition, 10 log10 of the ratio, by hand; a NaN among the energies is neither the best nor the worst."""
    assert decibels(signal, noise) == pytest.approx(expected, nan_ok=True)
