"""Power of the equivalence test. Oracles: Monte Carlo of scipy's t interval, and the table of the calibration (numerics 7.2)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from harness.judge.verdict.power import pass_probability, seeds_for


@pytest.mark.parametrize(
    ("sd", "seeds", "gap", "expected"),
    [
        (0.25, 3, 0.0, 0.98),
        (0.25, 3, 0.25, 0.93),
        (0.25, 3, 0.5, 0.71),
        (0.25, 5, 0.5, 0.97),
        (0.5, 3, 0.0, 0.56),
        (0.5, 5, 0.0, 0.95),
        (0.5, 5, 0.25, 0.86),
        (0.5, 8, 0.0, 0.999),
        (1.0, 5, 0.0, 0.30),
        (1.0, 10, 0.0, 0.80),
    ],
)
def test_pass_probability_agrees_with_the_calibrations_table(sd, seeds, gap, expected):
    assert pass_probability(seeds, sd, 1.0, gap) == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize(
    ("sd", "seeds", "gap"), [(0.6, 3, 0.0), (0.6, 20, 0.5), (0.8, 5, 0.0), (2.0, 60, -0.3)]
)
def test_pass_probability_agrees_with_monte_carlo(sd, seeds, gap):
    draws = 40_000
    x = np.random.default_rng(seeds).normal(gap, sd, (draws, seeds))
    half = scipy.stats.t.ppf(0.95, seeds - 1) * x.std(axis=1, ddof=1) / math.sqrt(seeds)
    rate = float(((x.mean(axis=1) - half > -1) & (x.mean(axis=1) + half < 1)).mean())
    scatter = 4 * math.sqrt(rate * (1 - rate) / draws)
    assert pass_probability(seeds, sd, 1.0, gap) == pytest.approx(rate, abs=scatter)


@pytest.mark.parametrize(
    ("sd", "seeds", "gap"), [(0.6, 3, 0.0), (5.0, 4, 0.5), (0.01, 200, 0.9), (1.0, 200, 0.0)]
)
def test_pass_probability_agrees_with_an_adaptive_integral(sd, seeds, gap):
    """Oracle: scipy's quadrature over scipy's chi distribution."""
    error, times = sd / math.sqrt(seeds), scipy.stats.t.ppf(0.95, seeds - 1)

    def inside(s):
        room = 1 / error - times * s
        cdf = scipy.stats.norm.cdf
        return (cdf(room - gap / error) - cdf(-room - gap / error)) * scipy.stats.chi.pdf(
            s, seeds - 1, scale=1 / math.sqrt(seeds - 1)
        )

    top = 1 / (times * error)
    points = [p for p in (0.5, 1.0, 1.5) if p < top]
    expected = scipy.integrate.quad(inside, 0, min(top, 8), points=points, limit=400)[0]
    assert pass_probability(seeds, sd, 1.0, gap) == pytest.approx(expected, abs=1e-7)


def test_at_a_gap_of_one_margin_no_number_of_seeds_passes_above_the_level():
    rates = [pass_probability(n, sd, 1.0, 1.0) for n in (3, 10, 60, 200) for sd in (0.05, 0.6, 3.0)]
    assert max(rates) <= 0.05 + 1e-9


def test_more_seeds_pass_more_often():
    for sd in (0.25, 0.6, 0.8):
        rates = [pass_probability(n, sd, 1.0) for n in range(3, 100)]
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(rates))


def test_seeds_for_is_the_smallest_number_that_reaches_the_power():
    n = seeds_for(0.8, 1.0, gap=0.2)
    assert pass_probability(n - 1, 0.8, 1.0, 0.2) < 0.8 <= pass_probability(n, 0.8, 1.0, 0.2)
    assert seeds_for(0.0, 0.0025) == 3
    assert seeds_for(0.0005, 0.0025) == seeds_for(0.2, 1.0)
    assert seeds_for(1.0, 1.0, most=9) is None
    assert seeds_for(0.1, 1.0, gap=1.5) is None


@pytest.mark.parametrize("wrong", [{"sd": -1.0}, {"margin": 0.0}, {"power": 1.0}, {"power": 0.0}])
def test_seeds_for_refuses_what_has_no_answer(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        seeds_for(**{"sd": 0.5, "margin": 1.0, **wrong})
