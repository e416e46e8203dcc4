"""Oracle: what is planted in the simulated curves, and the promises of the judge of loss on a part of the rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import verdict_error_rates as study

PAIRED = {row.planted.name: row for row in study.ROWS if row.group == "planted"}
FEW = [
    row
    for row in study.ROWS
    if isinstance(row.planted, study.Unpaired)
    and (row.planted.runs, row.planted.steps, row.planted.ar, row.planted.tails) == (5, 100, 0.9, 0)
]


@pytest.mark.parametrize("row", [*PAIRED.values(), *FEW], ids=lambda row: row.label)
def test_the_promises_of_what_is_planted_hold(row: study.Row) -> None:
    """Few draws: a rate of 5 % may be missed by the scatter that a bound allows for."""
    assert study.broken_promises([study.measure(row, 12)]) == []


def test_a_verdict_that_is_always_pass_breaks_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = study.judge_pairs
    monkeypatch.setattr(study, "judge_pairs", lambda *runs: replace(judge(*runs), outcome="PASS"))
    missed = study.broken_promises([study.measure(PAIRED["gap of two margins"], 12)])
    assert len(missed) == 2


def test_pairs_that_spike_are_still_pairs() -> None:
    generator, spiky = np.random.default_rng(0), study.Paired("", 20, spikes=(2.0, 2.0))
    notes = [note for _ in range(4) for note in study.judge_pairs(*spiky.draw(generator)).notes]
    assert not any(note.startswith("pairs_mixed") for note in notes)
