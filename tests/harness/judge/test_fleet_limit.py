"""How far a score may lie. Oracles: other draws than the limit was made of, the normal distribution, the page."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import harness.judge.fleet
from harness.cli.config import load
from harness.engine.plan import make_plan
from harness.judge.fleet.limit import RATE, TOLERANCE_SDS, limits, widening
from harness.judge.fleet.rates import SCORES, lines, rate
from harness.suites import SUITES

ROOT = Path(harness.judge.fleet.__file__).parents[3]


@pytest.mark.parametrize(("cards", "scores"), [(3, 1), (3, 6), (5, 12), (8, 6), (16, 3), (64, 6), (300, 6)])
def test_the_rate_of_false_alarms_is_that_of_the_whole_judgement(cards: int, scores: int) -> None:
    """Other draws. Three standard deviations of 4,000 fleets of which 5 % are out of line: 1 %."""
    found = rate(cards, 0.02, 0.0, scores, draws=4000)
    assert found < RATE + 0.012
    if widening(cards, scores) > 1:  # else the tolerance itself keeps it
        assert found > RATE - 0.012
    assert rate(cards, 0.01, 0.0, scores, draws=4000) < 0.01


def test_the_limit_of_a_large_fleet_is_a_quantile_of_the_normal_distribution() -> None:
    """Oracle: two-sided normal quantile at Sidak's level. The middle of 1,000 cards is nearly the true one."""
    cards, scores = 1000, 6
    level = 1 - (1 - RATE) ** (1 / (cards * scores))
    assert widening(cards, scores) == pytest.approx(stats.norm.isf(level / 2) / TOLERANCE_SDS, rel=0.03)


def test_more_cards_and_more_scores_widen_it() -> None:
    for some, more in itertools.pairwise([1, 2, 6, 24]):
        assert widening(8, some) <= widening(8, more)
    assert widening(8, 6) < widening(32, 6) < widening(256, 6)
    assert widening(3, 1) == 1.0


def test_the_tolerance_scales_the_limit() -> None:
    scores = np.zeros((1, 8))
    assert limits(scores, 0.1, 6)[1] == pytest.approx(np.log(1.1) * widening(8, 6))


def test_without_a_tolerance_it_would_cry_wolf() -> None:
    """What the tolerance is for: three cards of one spread often look as if one were far off."""
    scores = np.random.default_rng(0).normal(0, 0.01, (2000, 3))
    middle, limit = limits(scores, 1e-9, 1)
    assert (np.abs(scores - middle[:, None]) > limit[:, None]).any(axis=1).mean() > 0.2


def test_the_table_of_the_page_is_that_of_the_rule() -> None:
    """Oracle: the same draws again."""
    assert "\n".join(lines()) in (ROOT / "docs" / "fleet.md").read_text()


def test_the_table_is_of_as_many_scores_as_the_sweep_has() -> None:
    """Each suite of sweep=fleet, isolated and, as all of its cases are, sustained; links have a rule of their own."""
    request = load(["sweep=fleet"], lambda asked: "cuda")
    plan = make_plan(request.config, SUITES)
    sustained = plan.headline(request.timing.sustained_max_cases)
    cards = [c.case for c in plan.cases if c.case.suite != "links"]
    places = {(case.suite, False) for case in cards}
    places |= {(case.suite, True) for case in cards if case.case_id in sustained}
    assert len(places) == SCORES
    assert sustained == {case.case_id for case in cards}
