"""Margins of the decision. Oracles: the bar itself, over seeded draws; a step whose rates cannot err; margins of nothing."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

import margins
import pytest
from advise_fixtures import SIX, model, round_h200
from margins import Margins, Outcome, Step, drawn, lost, named, on, outcome, outcomes

from harness.advise import decide
from harness.advise.advised_arms import FLOOR
from harness.advise.rates import MEASURED
from harness.advise.step import Plan, Ratio

PRESENT, NONE = Margins(), Margins(1.0, 1.0, -math.inf)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    "source", [drawn, functools.partial(named, "gpt2"), functools.partial(named, "llama_125m")]
)
def test_the_advice_never_loses_by_itself_and_seldom_where_its_rates_err(
    source: margins.Source, measured: bool
) -> None:
    """Never below 1 at the assumed rates; at rates that err as they say, in one of twenty steps at most below 0.98."""
    found = outcomes(source, measured, PRESENT.layer_gain, 300 if measured else 600)
    assert all(o.predicted.value >= 1 for o in found if o.predicted is not None)
    real = on(found, PRESENT)
    assert len(real) > 30, "or the draws would say nothing"
    assert lost(real) <= 1 - margins.KEPT
    free = [o.real for o in found if o.predicted is not None]
    assert measured or min(free) < FLOOR, "some would lose: the draws reach that far"


def test_without_margins_more_steps_lose_than_the_bar_allows() -> None:
    """The steps of a small model are near break-even, so the bar can be missed."""
    found = outcomes(functools.partial(named, "llama_125m"), False, NONE.layer_gain, 300)
    assert lost(on(found, NONE)) > 1 - margins.KEPT


def test_rates_that_cannot_err_give_what_was_predicted() -> None:
    rates = round_h200()
    exact = replace(rates, figures={n: replace(f, spread=0.0) for n, f in rates.figures.items()})
    found = outcome(Step(model(("x", 8192, 8192)), exact, Plan(), SIX), random.Random(1))
    assert found.predicted == Ratio(found.real, found.real, found.real)
    assert found.real > 1.3
    narrow = Step(model(("x", 128, 128)), exact, Plan(), SIX)
    assert outcome(narrow, random.Random(1)) == Outcome(None, 1.0)


def test_the_same_draws_whatever_the_margin() -> None:
    free, strict = (outcomes(drawn, False, gain, 60) for gain in (1.0, 1.2))
    same = [a for a, b in zip(free, strict, strict=True) if a == b]
    assert 0 < len(same) < 60
    assert sum(o.predicted is None for o in strict) > sum(o.predicted is None for o in free)


def test_measured_rates_are_the_same_figures_with_smaller_errors() -> None:
    nominal, measured = (margins._rates("H200 SXM", kind) for kind in (False, True))
    for name in ("bf16", "fp8", "bandwidth"):
        assert measured[name] == pytest.approx(nominal[name], rel=1e-3)
        assert measured.figures[name].kind == MEASURED
        assert measured.figures[name].spread < nominal.figures[name].spread
    assert not measured.products


def test_margins_and_shares() -> None:
    """1.05 that may be 0.95 by 1.96 standard errors is 1.003 by 0.9 of them; the advice is on where none of it is below 1."""
    sure, wide = Ratio(1.05, 1.04, 1.06), Ratio(1.05, 0.95, 1.16)
    found = [
        Outcome(None, 1.0),
        Outcome(sure, 1.04),
        Outcome(wide, 0.97),
        Outcome(Ratio(1.01, 1.0, 1.02), 0.9),
    ]
    assert on(found, NONE) == [0.9, 0.97, 1.04]
    assert on(found, PRESENT) == [1.04]
    assert on(found, Margins(sure=0.9)) == [0.97, 1.04]
    assert [decide.verdict(o.predicted) for o in found if o.predicted] == ["on", "can't tell", "can't tell"]
    assert lost(on(found, NONE)) == pytest.approx(2 / 3)
    assert lost([]) == 0


def test_the_table_has_a_row_a_source_a_kind_of_rates_and_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(margins, "_NAMED", ("gpt2",))
    monkeypatch.setattr(margins, "COMPARED", (PRESENT,))
    lines = list(margins.table(40))
    assert len(lines) == 2 + 2 + 2 * 2
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert lines[2].startswith("| drawn | published, typical | 1.03, 1.02, 1.96 |")
    assert lines[4].startswith("| gpt2 | published, typical | 1.03, 1.02, none |")
