"""Oracle: scipy, the definitions, and rounds drawn with a known change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.gate import decide as decide_module
from harness.gate.decide import UnitVerdict, decide
from harness.store import stats

LIMIT = math.log1p(0.03)
NONE = np.empty(0)
rounds = st.lists(st.floats(-0.3, 0.3), min_size=3, max_size=9).map(np.array)


def one(first: np.ndarray, second: np.ndarray = NONE, limit: float = LIMIT):
    (decision,) = decide([first], [second], [limit])
    return decision


@given(st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=12).map(np.array))
def test_the_first_stage_is_students_test_against_the_limit(logs: np.ndarray) -> None:
    """Oracle: scipy, with the least spread, and the two guards by their definition."""
    decision = one(logs)
    x = (-1 if logs.mean() < 0 else 1) * logs - LIMIT
    if len(x) < 5 or (x <= 0).sum() > len(x) // 3 or abs(logs.mean()) <= LIMIT:
        assert decision.p == 1
        return
    t = x.mean() / max(x.std(ddof=1), decide_module.LEAST_SPREAD) * math.sqrt(len(x))
    assert decision.p == pytest.approx(scipy.stats.t.sf(t, len(x) - 1), rel=1e-6, abs=1e-300)


@settings(max_examples=200)
@given(rounds, rounds)
def test_swapping_the_sides_mirrors_everything(first: np.ndarray, second: np.ndarray) -> None:
    a, b = one(first, second), one(-first, -second)
    mirror = {UnitVerdict.REGRESSED: UnitVerdict.IMPROVED, UnitVerdict.IMPROVED: UnitVerdict.REGRESSED}
    if a.verdict in mirror or b.verdict in mirror:
        assert mirror[a.verdict] == b.verdict
    assert (a.effect.log, a.low, a.high) == pytest.approx((-b.effect.log, -b.high, -b.low), abs=1e-12)
    assert a.flagged == b.flagged


def test_holm_runs_over_what_was_flagged() -> None:
    """Each confirmation has p = 0.004 (scipy): two at once stay within 0.01 by Holm, three do not.

    Units that were measured again only because they share a case with a flagged one do not count.
    """
    slow, fast = np.full(10, 0.1), np.zeros(10)
    noise = np.array([-1, 1] * 5) * 0.005
    again = LIMIT + noise + scipy.stats.t.isf(0.004, 9) * noise.std(ddof=1) / math.sqrt(10)
    for flagged, confirmed, fresh in ((2, 2, NONE), (3, 0, NONE), (2, 2, fast)):
        first = [slow] * flagged + [fast] * 100
        second = [again] * flagged + [fresh] * 100
        found = decide(first, second, [LIMIT] * len(first))
        assert sum(d.verdict is UnitVerdict.REGRESSED for d in found) == confirmed


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_by_its_definition(p_values: list[float]) -> None:
    """Step down: the k-th smallest p is compared with alpha / (m - k + 1), and the first that fails stops all."""
    adjusted = stats.holm(p_values)
    for alpha in (0.01, 0.05, 0.3):
        rejected, order = set(), sorted(range(len(p_values)), key=lambda i: p_values[i])
        for k, i in enumerate(order):
            if p_values[i] * (len(p_values) - k) > alpha:
                break
            rejected.add(i)
        assert rejected == {i for i, p in enumerate(adjusted) if p <= alpha}


def test_the_interval_that_decides_is_students_with_the_scatter_of_processes() -> None:
    """Oracle: scipy, and Welch and Satterthwaite's degrees of freedom by hand."""
    rows = np.random.default_rng(6).normal(0, 0.01, 10)
    (found,) = decide([rows], [NONE], [LIMIT], scatter=0.04)
    own, processes = rows.var(ddof=1) / 10, 0.04**2
    degrees = math.floor((own + processes) ** 2 / (own**2 / 9 + processes**2 / 5))
    expected = scipy.stats.t.interval(0.95, degrees, rows.mean(), math.sqrt(own + processes))
    assert (found.low, found.high) == pytest.approx(expected)
    (alone,) = decide([rows], [NONE], [LIMIT])
    assert (alone.low, alone.high) == (alone.effect.log_low, alone.effect.log_high)
    (second,) = decide([rows], [NONE], [LIMIT], looks=2)
    wider = scipy.stats.t.interval(0.99, 9, rows.mean(), rows.std(ddof=1) / math.sqrt(10))
    assert (second.low, second.high) == pytest.approx(wider)


@pytest.mark.parametrize("mean", [0.0, 0.05, 0.06])
def test_the_rounds_that_are_promised_are_the_fewest_that_settle_it(mean: float) -> None:
    """Rounds of the same mean and spread. Oracle: scipy's t test, two-sided 5 % below the limit and 1 % above."""

    def drawn(count: int) -> np.ndarray:
        signs = np.resize([-1.0, 1.0], count)
        signs -= signs.mean()
        return mean + 0.06 * signs / signs.std(ddof=1)

    found = one(drawn(8))
    assert (found.verdict, found.apart) == (UnitVerdict.INCONCLUSIVE, False)
    assert found.more is not None
    for count, settled in ((8 + found.more, True), (7 + found.more, False)):
        p = scipy.stats.t.sf(abs(mean - LIMIT) / 0.06 * math.sqrt(count), count - 1)
        assert bool(p <= (0.025 if mean < LIMIT else 0.01)) is settled
        if mean < LIMIT:
            assert (one(drawn(count)).verdict is UnitVerdict.OK) is settled
