"""The ledger and the error rates of the verdict on anyone's curves. Oracles: the published pages, and what is planted."""

from __future__ import annotations

import csv
from dataclasses import replace

import curve_verdict_rates as rates
import evidence
import numpy as np
import pytest
from documented_table import documented
from verdict_error_rates import Bound

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
def test_noise_has_the_deviation_that_is_asked(noise: str) -> None:
    row = rates.Row(noise, 4000, 1.0, 0.5, ())
    late = rates.LATE if noise == "drifting" else 1
    base, mine = ([run.end(late) for run in side] for side in rates.draw(row, np.random.default_rng(0)))
    margin = 2 * rates.MARGIN
    assert np.sqrt((np.var(base) + np.var(mine)) / 2) / margin == pytest.approx(0.5, rel=0.1)
    assert (np.mean(mine) - np.mean(base)) / margin == pytest.approx(1.0, abs=0.05)


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


def test_a_broken_promise_is_named() -> None:
    (row,) = (row for row in rates.ROWS[:1])
    wrong = replace(row, bounds=(Bound("PASS", 0.05),), draws=400, rates=rates.Counter({"PASS": 0.5}))
    assert len(rates.broken_promises([wrong])) == 1
    assert "none" not in rates.tables([wrong])["promises"]
