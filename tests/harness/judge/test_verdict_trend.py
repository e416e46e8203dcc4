"""Trend of the verdict (L5). Oracles: straight lines in log(step), and scipy's t quantile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import STEPS, control, shifted

from harness.judge.verdict import judge_pairs
from harness.judge.verdict.curves import Pairs, ema, half_life
from harness.judge.verdict.gates import Evidence, trend
from harness.judge.verdict.result import MARGIN
from harness.judge.verdict.spike_events import Calm

BASE = control()


def growing(size):
    """A gap that grows with log(step) from a tenth of the run on, by so many nats per e-fold."""
    return lambda t: size * np.clip(np.log(np.maximum(t, 1) / 30), 0, None)


def on_lines(slopes, end, length=400):
    """Paired runs whose smoothed gap is a line in log(step), of a mean control loss of 1.

    Args:
        slopes: per e-fold of steps, by seed.
        end: the gap at the end, by seed.
        length: steps.
    """
    steps = np.arange(length, dtype=float)
    x = np.log(steps + 1)
    smooth = np.array(end)[:, None] + np.array(slopes)[:, None] * (x - x[-1])
    d = 0.5 ** (1 / half_life(length))
    gap = np.empty_like(smooth)
    gap[:, 0] = smooth[:, 0] / (1 - d)
    gap[:, 1:] = (smooth[:, 1:] - d * smooth[:, :-1]) / (1 - d)
    np.testing.assert_allclose(ema(gap, steps, half_life(length), from_zero=True), smooth, atol=1e-12)
    flat = np.ones_like(gap)
    pairs = Pairs(tuple(range(len(slopes))), steps, flat + gap, flat)
    none = np.zeros((2, len(slopes)), np.int64)
    return Evidence({}, {}, Calm(pairs, gap, np.zeros(gap.shape, bool), none > 0, none))


def test_a_growing_gap_cannot_be_passed_and_a_flat_or_falling_one_can():
    slow = judge_pairs(shifted(BASE, lambda t: 0.003 * np.log1p(t) / np.log1p(STEPS), sd=1e-5), BASE)
    assert slow.gate("L5").status == "PASS"  # projected to 0.20 % of the loss: inside the margin
    fast = judge_pairs(shifted(BASE, growing(0.0015), sd=1e-5), BASE)
    assert fast.gate("L4").status == "PASS"
    assert fast.gate("L5").status == fast.outcome == "INCONCLUSIVE"
    for gap in (0.0, growing(-0.004)):
        assert judge_pairs(shifted(BASE, gap), BASE).gate("L5").status == "PASS"


def test_the_step_at_which_the_margin_is_met_is_that_of_the_line():
    """Oracle: without a spread between seeds the bound is the line itself, 0.5 M + 0.25 M ln(steps / 400) = M."""
    result = trend(on_lines([0.25 * MARGIN] * 3, [0.5 * MARGIN] * 3))
    assert result.margin_at_step == pytest.approx(400 * math.exp(2), rel=1e-4)
    assert f"after {result.margin_at_step:,.0f} steps" in result.sentence


def test_the_bound_is_the_one_sided_95_percent_of_the_mean_over_seeds():
    """Oracle: at the step found, mean + t(.95, n - 1) sd / sqrt(n) of the extrapolated lines, by scipy, is the margin."""
    slopes, ends = np.array([0.1, 0.2, 0.3, 0.4]) * MARGIN, np.array([0.1, -0.2, 0.3, 0.0]) * MARGIN
    result = trend(on_lines(slopes, ends))
    lines = ends + slopes * math.log(result.margin_at_step / 400)
    bound = lines.mean() + scipy.stats.t.ppf(0.95, 3) * scipy.stats.sem(lines)
    assert bound == pytest.approx(MARGIN, rel=1e-4)
    assert 1 < result.margin_at_step / 400 <= 1000


@pytest.mark.parametrize(
    ("slope", "end", "step", "words"),
    [
        (0.0, 0.5, math.inf, "does not meet the margin within 1,000 times the steps of the run"),
        (0.0, 1.5, 400, "has met the margin"),
        (-0.5, 1.5, 400, "has met the margin"),
    ],
)
def test_the_sentence_always_says_when_the_bound_meets_the_margin(slope, end, step, words):
    result = trend(on_lines([slope * MARGIN] * 3, [end * MARGIN] * 3))
    assert result.margin_at_step == step
    assert words in result.sentence
