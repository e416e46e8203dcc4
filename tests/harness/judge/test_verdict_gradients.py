"""Gate on gradient norms. Oracles: planted ratios, scipy's t interval of their logarithms, the limits of the design."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import control, shifted

from harness.judge.verdict import Curve, judge_pairs

BASE = control()
RECIPE = 1.03  # of the recipe itself, in the golden arm


def times(runs, factor, where="grad_norm"):
    """The runs with norms so many times as large: a number, or a function of (seed, steps)."""
    own = factor if callable(factor) else lambda seed, steps: factor
    out = {}
    for seed, run in runs.items():
        curve = getattr(run, where) or run.grad_norm
        values = curve.values * own(seed, curve.steps)
        out[seed] = dataclasses.replace(run, **{where: Curve(curve.steps, values)})
    return out


GOLDEN = times(shifted(BASE), RECIPE)


def l6(candidate, golden=None, base=BASE, **more):
    return judge_pairs(candidate, base, golden=golden, **more).gate("L6")


def by_seed(centre, sd):
    """A factor that differs between seeds, the same at all steps."""
    return lambda seed, steps: centre * math.exp(sd * np.random.default_rng(seed).normal())


@pytest.mark.parametrize(
    ("ratio", "alone"),
    [
        (1.0, "PASS"),
        (0.985, "PASS"),
        (1.03, "INCONCLUSIVE"),
        (0.962, "INCONCLUSIVE"),
        (0.933, "INCONCLUSIVE"),
        (0.85, "FAIL"),
        (1.2, "FAIL"),
    ],
)
@pytest.mark.parametrize("golden", [None, {s: GOLDEN[s] for s in (0, 1)}], ids=["none", "two runs"])
def test_without_golden_runs_the_gate_says_what_it_cannot_see(ratio, alone, golden):
    """Ratios are those that the calibration measured for its faults."""
    result = l6(times(shifted(BASE), ratio), golden)
    assert result.status == alone
    assert result.effect == pytest.approx(ratio)
    assert (
        "an error of the gradients' scale of 2 % or less, or within the interval, is not seen"
        in result.sentence
    )


def test_the_interval_is_students_of_the_logarithms_and_decides():
    """Oracle: scipy's t interval. A wide one that reaches a failure's size is INCONCLUSIVE, wherever its middle lies."""
    factor = by_seed(1.02, 0.004)
    logs = [math.log(factor(s, None)) for s in BASE]
    low, high = np.exp(scipy.stats.t.interval(0.95, 4, np.mean(logs), scipy.stats.sem(logs)))
    result = l6(times(shifted(BASE), factor), shifted(BASE))
    assert (result.low, result.high) == (pytest.approx(low), pytest.approx(high))
    assert result.effect == pytest.approx(math.exp(np.mean(logs)))
    assert (result.seeds, result.margin, result.unit) == (5, 0.01, "ratio")
    for centre in (1.0, 1.03, 1.1):
        assert l6(times(shifted(BASE), by_seed(centre, 0.1)), shifted(BASE)).status == "INCONCLUSIVE"


def test_only_seeds_of_both_arms_are_compared():
    golden = {s: r for s, r in shifted(BASE).items() if s != 2}
    candidate = times(shifted(BASE), lambda seed, steps: 1.05 if seed == 2 else 1.02)
    result = l6(candidate, golden)
    assert (result.effect, result.seeds) == (pytest.approx(1.02), 4)
