"""Gate on gradient norms. Oracles: planted ratios, scipy's t interval of their logarithms, the limits of the design."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
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
