"""Oracle: what is planted in the simulated curves, and the promises of the loss verdict on a part of the rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import verdict_error_rates as study

ROWS = {row.scenario.name: row for row in study.ROWS if row.group == "planted"}


def test_the_paired_late_mean_and_the_held_out_gap_have_the_deviation_that_is_asked() -> None:
    """And share a constant: half of the variance."""
    scenario = study.Scenario("many", seeds=400, sd=0.5, offset=1.0)
    mine, control = study.draw(scenario, np.random.default_rng(0))
    late = round(study.LATE * study.STEPS)
    gaps = np.array([(mine[s].loss.values - control[s].loss.values)[-late:].mean() for s in mine])
    ends = np.array([mine[s].heldout.values[-1] - control[s].heldout.values[-1] for s in mine])
    margin = study.MARGIN * study.END
    for found in (gaps, ends):
        assert found.mean() / margin == pytest.approx(1.0, abs=0.1)
        assert found.std() / margin == pytest.approx(0.5, rel=0.1)
    assert np.corrcoef(gaps, ends)[0, 1] == pytest.approx(study.BETWEEN, abs=0.12)


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.scenario.name)
def test_the_promises_of_what_is_planted_hold(row: study.Row) -> None:
    """Few draws: a rate of 5 % may be missed by the scatter that a bound allows for."""
    assert study.broken_promises([study.measure(row, 12)]) == []


def test_a_verdict_that_is_always_pass_breaks_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = study.judge_pairs
    monkeypatch.setattr(study, "judge_pairs", lambda *runs: replace(judge(*runs), outcome="PASS"))
    missed = study.broken_promises([study.measure(ROWS["gap of two margins"], 12)])
    assert len(missed) == 2


def test_pass_that_falls_with_more_seeds_is_a_broken_promise() -> None:
    few, many = (
        r
        for r in study.ROWS
        if r.scenario.name == "gap 0 M" and r.scenario.sd == 0.6 and r.scenario.seeds < 8
    )
    rated = [replace(r, draws=400, rates=study.Counter(PASS=p)) for r, p in ((few, 0.9), (many, 0.5))]
    assert len(study.broken_promises(rated)) == 1
    assert study.broken_promises(rated[::-1]) == []


def test_tables() -> None:
    rows = [replace(r, draws=400, rates=study.Counter({"PASS": 0.25, "L4 PASS": 0.04})) for r in study.ROWS]
    made = study.tables(rows)
    assert "| no gap | 25.0 | 0.0 | 0.0 |" in made["planted"].splitlines()
    assert made["more seeds"].splitlines()[2] == "| gap 0 M | 0.25 | 25 | 25 | 25 | 25 | 25 |"
    assert "| L4 PASS | 4.0 |" in made["levels"].splitlines()
    assert made["needed"].splitlines()[2] == "| 0 | 3 | 4 | 5 | 8 | 11 |"
