"""The error rates of the verdict on anyone's curves. Oracle: what is planted."""

from __future__ import annotations

import curve_verdict_rates as rates
import evidence
import pytest
from documented_table import documented

FEW = 12
RATES = evidence.ROOT / "reports" / "published" / "studies" / "curve-verdict-error-rates.md"


@pytest.mark.parametrize("noise", rates.NOISES)
def test_the_promises_hold_in_a_few_draws(noise: str) -> None:
    rows = [row for row in rates.ROWS if row.noise == noise and row.runs == 5]
    assert rates.broken_promises([rates.measure(row, FEW) for row in rows]) == []


@pytest.mark.slow
def test_the_published_rates_are_measured_again() -> None:
    """The page's draws: with fewer, one of its many rates may lie beyond the scatter that a bound allows for."""
    rows = [rates.measure(row, 200) for row in rates.ROWS]
    for name, table in rates.tables(rows).items():
        assert documented(RATES, name) == table.splitlines()
