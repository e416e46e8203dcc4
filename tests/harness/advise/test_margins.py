"""Margins of the decision. Oracles: the bar itself, over seeded draws; a step whose rates cannot err; margins of nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from advise_fixtures import SIX, model, round_h200

from harness.advise import decide, margins
from harness.advise.margins import Outcome, Step, drawn, lost, named, on, outcome, outcomes
from harness.advise.rates import MEASURED
from harness.advise.step import Plan

Source = Callable[[random.Random, bool], Step]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("source", [drawn, named])
def test_the_advice_never_loses_by_itself_and_seldom_where_its_rates_err(
    source: Source, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never below 1 at the assumed rates; at rates that err as they say, in one of twenty steps at most below 0.98."""
    monkeypatch.setattr(margins, "_NAMED", ("nanogpt_char", "gpt2", "llama_125m"))
    found = outcomes(source, measured, decide.LAYER_GAIN, 200 if measured else 500)
    assert all(o.predicted >= 1 for o in found)
    real = on(found, decide.STEP_GAIN)
    assert len(real) > len(found) / 4, "or the draws would say nothing"
    assert lost(real) <= (1 - margins.KEPT) / (2 if measured else 1)
    assert real[0] < 0.98, "some do lose: the draws reach that far"


def test_without_margins_more_steps_lose_than_the_bar_allows() -> None:
    """So the bar is one that can be missed."""
    found = outcomes(drawn, False, 1.0, 800)
    assert lost(on(found, 1.0)) > 1 - margins.KEPT


def test_rates_that_cannot_err_give_what_was_predicted() -> None:
    rates = round_h200()
    exact = replace(rates, figures={n: replace(f, spread=0.0) for n, f in rates.figures.items()})
    step = Step(model(("x", 8192, 8192)), exact, Plan(), SIX)
    found = outcome(step, random.Random(1))
    assert found.real == found.predicted > 1.3
    narrow = Step(model(("x", 128, 128)), exact, Plan(), SIX)
    assert outcome(narrow, random.Random(1)) == Outcome(1.0, 1.0)


def test_the_same_seed_gives_the_same_steps_whatever_the_margin() -> None:
    free, strict = (outcomes(drawn, False, gain, 60) for gain in (1.0, 1.2))
    same = [a for a, b in zip(free, strict, strict=True) if a == b]
    assert 0 < len(same) < 60
    assert sum(o.predicted > 1 for o in strict) < sum(o.predicted > 1 for o in free)


def test_measured_rates_are_the_same_figures_with_smaller_errors() -> None:
    nominal, measured = (margins._rates("H200 SXM", kind) for kind in (False, True))
    for name in ("bf16", "fp8", "bandwidth"):
        assert measured[name] == pytest.approx(nominal[name], rel=1e-3)
        assert measured.figures[name].kind == MEASURED
        assert measured.figures[name].spread < nominal.figures[name].spread
    assert not measured.products


def test_shares_and_ranges() -> None:
    found = [Outcome(1.0, 1.0), Outcome(1.01, 0.9), Outcome(1.03, 0.97), Outcome(1.2, 1.1)]
    assert on(found, 1.0) == [0.9, 0.97, 1.1]
    assert on(found, 1.02, 1.05) == [0.97]
    assert lost(on(found, 1.0)) == pytest.approx(2 / 3)
    assert lost([]) == 0


def test_the_table_has_a_row_a_pair_of_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(margins, "_NAMED", ("gpt2",))
    monkeypatch.setattr(margins, "LAYER_GAINS", (decide.LAYER_GAIN,))
    monkeypatch.setattr(margins, "STEP_GAINS", (1.02,))
    lines = list(margins.table(40))
    assert len(lines) == 2 + 2 * 2 * 2
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert lines[3].startswith("| drawn | published, typical | 1.03 | 1.02 to 1.05 |")
