"""Seeds that a verdict needs. Oracles: draws of the tests themselves, and a table of simulated TOST pass probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.judge.verdict.stored_noise import seeds_for, tost_power
from harness.store.stats import t_quantile

# sd and gap in units of the margin, seeds, share of passes: simulated for the design, two digits each.


@pytest.mark.parametrize(
    ("sd", "gap", "seeds"), [(0.3, 0.5, 4), (0.7, -0.25, 9), (1.2, 0.0, 30), (0.5, 1.0, 5)]
)
def test_the_power_is_the_share_of_draws_that_pass(sd: float, gap: float, seeds: int) -> None:
    """100,000 draws: a standard error of at most 0.0016; 5 of them are allowed."""
    draws = np.random.default_rng(seeds).normal(gap, sd, (100_000, seeds))
    half = t_quantile(0.95, seeds - 1) * draws.std(axis=1, ddof=1) / math.sqrt(seeds)
    share = float((np.abs(draws.mean(axis=1)) + half < 1.0).mean())
    assert tost_power(sd, 1.0, seeds, gap) == pytest.approx(share, abs=0.008)


def test_at_the_margin_itself_the_tests_pass_by_error_alone() -> None:
    assert tost_power(0.1, 1.0, 5, gap=1.0) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("gap", [0.0, 0.5, -0.5])
@pytest.mark.parametrize("sd", [0.2, 0.4, 0.8, 1.6])
def test_the_seeds_are_the_fewest_that_reach_the_power(sd: float, gap: float) -> None:
    seeds = seeds_for(sd, 1.0, gap)
    assert seeds is not None
    assert tost_power(sd, 1.0, seeds, gap) >= 0.8
    assert seeds == 3 or tost_power(sd, 1.0, seeds - 1, gap) < 0.8
    assert seeds_for(0.0025 * sd, 0.0025, 0.0025 * gap) == seeds  # units cancel


def test_where_no_number_suffices_it_says_so() -> None:
    assert seeds_for(1.0, 1.0, gap=1.0) is None
    assert seeds_for(1.0, 1.0, gap=2.0) is None
    assert seeds_for(1.0, 1.0, most=10) is None
    assert seeds_for(1.0, 1.0, most=11) == 11


@pytest.mark.parametrize(
    "wrong", [{"sd": 0.0}, {"sd": math.nan}, {"margin": 0.0}, {"power": 1.0}, {"gap": math.inf}, {"sd": -1.0}]
)
def test_what_is_no_question_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        seeds_for(**{"sd": 1.0, "margin": 1.0, **wrong})
