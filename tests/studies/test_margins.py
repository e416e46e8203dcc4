"""Margins of the decision. Oracles: the bar itself, over seeded draws; a step whose rates cannot err; margins of nothing."""

from __future__ import annotations

import functools
import math

import margins
import pytest
from margins import Margins, drawn, lost, named, on, outcomes

from harness.advise.advised_arms import FLOOR

PRESENT, NONE = Margins(), Margins(1.0, 1.0, -math.inf)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    "source",
    [
        drawn,
        pytest.param(functools.partial(named, "gpt2"), marks=pytest.mark.slow),
        pytest.param(functools.partial(named, "llama_125m"), marks=pytest.mark.slow),
    ],
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


@pytest.mark.slow
def test_without_margins_more_steps_lose_than_the_bar_allows() -> None:
    """The steps of a small model are near break-even, so the bar can be missed."""
    found = outcomes(functools.partial(named, "llama_125m"), False, NONE.layer_gain, 300)
    assert lost(on(found, NONE)) > 1 - margins.KEPT
