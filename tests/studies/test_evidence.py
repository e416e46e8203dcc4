"""The ledger and the error rates of the verdict on anyone's curves. Oracles: the published pages, and what is planted."""

from __future__ import annotations

import csv

import curve_verdict_rates as rates
import evidence
import pytest
from documented_table import documented

FEW = 12
RATES = evidence.ROOT / "reports" / "published" / "studies" / "curve-verdict-error-rates.md"


def test_the_ledger_is_what_the_rule_says() -> None:
    lines = evidence.ledger()
    assert documented(evidence.PAGE, "ledger") == evidence.markdown(lines).splitlines()
    with evidence.LEDGER.open(newline="") as file:
        assert list(csv.DictReader(file)) == lines


def test_single_pairs_are_never_decided() -> None:
    single = [line for line in evidence.ledger() if line["runs"] == "1 + 1"]
    assert len(single) == 5
    assert {line["verdict"] for line in single} == {"INCONCLUSIVE"}


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
