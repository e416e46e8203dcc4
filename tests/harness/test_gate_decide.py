"""Oracle: the definitions, by brute force over all sign patterns, and scipy; the speed bar of the judge."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.gate import decide as decide_module
from harness.gate.decide import Verdict, decide
from harness.store import stats
from harness.store.effect import MIN_ROUNDS

LIMIT = math.log1p(0.03)
NONE = np.empty(0)
rounds = st.lists(st.floats(-0.3, 0.3), min_size=3, max_size=9).map(np.array)


def one(first: np.ndarray, second: np.ndarray = NONE, limit: float = LIMIT):
    (decision,) = decide([first], [second], [limit])
    return decision


@pytest.mark.parametrize("module", [stats, decide_module], ids=lambda m: m.__name__)
def test_doctests(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


@given(rounds)
def test_the_first_stage_is_the_exact_test_against_the_limit(logs: np.ndarray) -> None:
    decision = one(logs)
    direction = -1 if logs.mean() < 0 else 1
    x = direction * logs - LIMIT
    patterns = [np.dot(signs, abs(x)) for signs in itertools.product((1, -1), repeat=len(x))]
    p = np.mean(np.array(patterns) >= x.sum() - 1e-12 * abs(x).sum())
    if abs(logs.mean()) > LIMIT:
        assert decision.p == pytest.approx(p)
    else:
        assert p >= 0.5 - 1e-9  # so it need not be counted
        assert decision.p == 1


@settings(max_examples=200)
@given(rounds, rounds)
def test_swapping_the_sides_mirrors_everything(first: np.ndarray, second: np.ndarray) -> None:
    a, b = one(first, second), one(-first, -second)
    mirror = {Verdict.REGRESSED: Verdict.IMPROVED, Verdict.IMPROVED: Verdict.REGRESSED}
    if a.verdict in mirror or b.verdict in mirror:
        assert mirror[a.verdict] == b.verdict
    assert (a.mean, a.low, a.high) == pytest.approx((-b.mean, -b.high, -b.low), abs=1e-12)
    assert a.flagged == b.flagged


def test_ok_is_a_claim_about_the_whole_interval() -> None:
    spread = np.array([-1, 1] * 5) * 0.01
    _, _, (high,) = stats.t_intervals([spread])
    for shift, verdict in ((LIMIT - high - 1e-6, Verdict.OK), (LIMIT - high + 1e-6, Verdict.INCONCLUSIVE)):
        assert one(spread + shift).verdict is verdict


def test_holm_runs_over_what_was_flagged() -> None:
    """Ten fresh rounds can reach 1 / 1024: ten flagged units can all be confirmed at 0.01, eleven cannot.

    Units that were measured again only because they share a case with a flagged one do not count.
    """
    slow, fast = np.full(10, 0.1), np.zeros(10)
    for flagged, confirmed, fresh in ((10, 10, NONE), (11, 0, NONE), (10, 10, fast)):
        first = [slow] * flagged + [fast] * 100
        second = [slow] * flagged + [fresh] * 100
        found = decide(first, second, [LIMIT] * len(first))
        assert sum(d.verdict is Verdict.REGRESSED for d in found) == confirmed


def test_too_few_rounds_decide_nothing() -> None:
    for count in range(MIN_ROUNDS):
        decision = one(np.full(count, -0.5))
        assert decision.verdict is Verdict.INCONCLUSIVE
        assert decision.more is not None
        assert decision.more + count >= MIN_ROUNDS


def test_what_sits_at_the_limit_is_settled_by_no_number_of_rounds() -> None:
    assert one(LIMIT + np.array([-1, 1] * 5) * 0.05).more is None


def test_intervals_and_medians_against_scipy_and_numpy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    rows = random.standard_normal((20, 7))
    mean, low, high = stats.t_intervals(rows)
    expected = scipy.t.interval(0.95, 6, rows.mean(1), scipy.sem(rows, axis=1))
    np.testing.assert_allclose((low, high), expected, rtol=1e-9)
    np.testing.assert_allclose(mean, rows.mean(1))
    groups = random.integers(0, 9, 200)
    values = random.standard_normal(200)
    names, medians = stats.group_medians(values, groups)
    np.testing.assert_array_equal(names, np.unique(groups))
    np.testing.assert_allclose(medians, [np.median(values[groups == g]) for g in names])


@pytest.mark.parametrize(("hits", "trials"), [(0, 20), (20, 20), (9, 10), (1, 1), (0, 1), (17, 400)])
def test_clopper_pearson_against_scipy(hits: int, trials: int) -> None:
    scipy = pytest.importorskip("scipy.stats")
    expected = scipy.binomtest(hits, trials).proportion_ci(method="exact")
    assert stats.clopper_pearson(hits, trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


@pytest.mark.parametrize(("hits", "trials"), [(-1, 5), (6, 5), (0, 0)])
def test_clopper_pearson_refuses_what_is_no_share(hits: int, trials: int) -> None:
    with pytest.raises(ValueError, match=f"{hits} hits of {trials}"):
        stats.clopper_pearson(hits, trials)


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
