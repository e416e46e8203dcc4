"""Statistics. Oracles: scipy, brute force over all sign patterns, and properties (hypothesis)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from harness.store import stats

finite = st.floats(-1e6, 1e6, allow_nan=False)
times = st.floats(1e-3, 1e3, allow_nan=False)


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40), st.sampled_from([0.5, 0.9, 0.95, 0.99])
)
def test_t_interval_agrees_with_scipy(values: list[float], confidence: float) -> None:
    low, high = stats.t_interval(values, confidence)
    spread = float(np.std(values, ddof=1))
    if spread == 0:
        assert low == high == pytest.approx(values[0])
        return
    oracle = scipy.stats.t.interval(confidence, len(values) - 1, np.mean(values), scipy.stats.sem(values))
    assert (low, high) == pytest.approx(tuple(oracle), rel=1e-9, abs=1e-9)


@given(st.lists(finite, min_size=1, max_size=60))
def test_the_median_agrees_with_scipy(values: list[float]) -> None:
    assert stats.median(values) == pytest.approx(scipy.stats.mstats.mquantiles(values, 0.5, 1, 1)[0])


@given(st.lists(times, min_size=2, max_size=30))
def test_geometric_mean_agrees_with_scipy_and_lies_in_its_interval(ratios: list[float]) -> None:
    e = stats.geometric_mean(ratios)
    assert e.value == pytest.approx(scipy.stats.gmean(ratios), rel=1e-9)
    assert e.low <= e.value * (1 + 1e-12)
    assert e.high >= e.value * (1 - 1e-12)
    inverse = stats.geometric_mean([1 / r for r in ratios])
    assert (inverse.value, inverse.low, inverse.high) == pytest.approx(
        (1 / e.value, 1 / e.high, 1 / e.low), rel=1e-6
    )


def test_ratios_are_paired_by_round() -> None:
    """Worked by hand: round 2 is missing on one side and round 5 on the other."""
    ratios = stats.paired_log_ratios(
        [1.0, 3.0, 2.0, 7.0, 4.0], [0, 0, 0, 2, 1], [8.0, 4.0, 4.0, 9.0, 100.0], [1, 0, 0, 5, 0]
    )
    assert ratios.tolist() == pytest.approx([math.log(4 / 2), math.log(8 / 4)])


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(0.5, 0.999))
def test_prediction_interval_agrees_with_scipys_quantile(values: list[float], confidence: float) -> None:
    """Oracle: mean -+ t sd sqrt(1 + 1/n) with scipy's t."""
    x = np.array(values)
    half = scipy.stats.t.ppf((1 + confidence) / 2, x.size - 1) * x.std(ddof=1) * math.sqrt(1 + 1 / x.size)
    expected = (x.mean() - half, x.mean() + half)
    assert stats.prediction_interval(values, confidence) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_of_one_value_nothing_is_known() -> None:
    assert stats.t_interval([3.0]) == stats.prediction_interval([3.0]) == (-math.inf, math.inf)
    estimate = stats.geometric_mean([2.0])
    assert (estimate.value, estimate.low, estimate.high, estimate.count) == (
        pytest.approx(2.0),
        0.0,
        math.inf,
        1,
    )


@pytest.mark.parametrize(
    ("call", "values"),
    [
        *((call, (none,)) for call in (stats.median, stats.t_interval) for none in ([], [1.0, math.inf])),
        *((stats.t_quantile, of) for of in ((0.0, 3), (1.0, 3), (math.nan, 3), (0.5, 0))),
        (stats.t_interval, ([1.0, 2.0], 1.0)),
        (stats.geometric_mean, ([1.0, 0.0],)),
        (stats.paired_log_ratios, ([1.0], [0], [1.0], [1])),
        (stats.paired_log_ratios, ([1.0, 2.0], [0], [1.0], [0])),
        (stats.paired_log_ratios, ([1.0], [0], [-1.0], [0])),
    ],
)
def test_what_has_no_answer_is_refused(call: Any, values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"no values|finite|needs 0|between 0 and 1|logarithm|empty|round"):
        call(*values)


def test_intervals_of_many_rows_agree_with_scipy() -> None:
    rows = np.random.default_rng(0).standard_normal((20, 7))
    _, low, high = stats.t_intervals(rows)
    expected = scipy.stats.t.interval(0.95, 6, rows.mean(1), scipy.stats.sem(rows, axis=1))
    np.testing.assert_allclose((low, high), expected, rtol=1e-9)
