"""Gate on gradient norms. Oracles: planted ratios, scipy's t interval of their logarithms, the limits of the design."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import STEPS, control, rows_of_runs, shifted
from report_fixtures import frame

from harness.judge.verdict import Curve, judge, judge_pairs

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
    ("error", "status"),
    [
        (1.0, "PASS"),
        (1.009, "PASS"),
        (1.02, "WARN"),
        (0.98, "WARN"),
        (1.049, "WARN"),
        (1.06, "FAIL"),
        (1.1, "FAIL"),
        (1 / 1.1, "FAIL"),
        (0.0, "FAIL"),
    ],
)
def test_an_error_of_the_scale_is_named_with_its_size(error, status):
    """The golden arm shows the recipe's own effect, here none."""
    result = l6(times(shifted(BASE), error), shifted(BASE))
    assert result.status == status
    assert result.effect == pytest.approx(max(error, 1e-3))


@pytest.mark.parametrize(
    ("ratio", "status"), [(1.0, "PASS"), (1.03, "PASS"), (1.07, "PASS"), (1.1, "INCONCLUSIVE")]
)
def test_what_the_recipe_itself_does_is_told_and_beyond_four_bands_nobody_can_tell(ratio, status):
    """The candidate does what its golden arm does, to the bit."""
    result = l6(times(shifted(BASE), ratio), times(shifted(BASE), ratio))
    assert result.status == status
    assert result.effect == pytest.approx(1.0 if status == "PASS" else ratio)


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


def test_without_golden_runs_a_mean_of_one_whose_seeds_scatter_does_not_pass():
    """Oracle: the factors' geometric mean is 1, and one sd of their logarithms, 0.22, is beyond four bands."""
    factors = (0.8, 1.25, 0.8, 1.25, 1.0)
    result = l6(times(shifted(BASE), lambda seed, steps: factors[seed]))
    assert result.effect == pytest.approx(1.0)
    assert result.status == "INCONCLUSIVE"


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


def test_step_0_shows_an_error_that_the_noise_of_later_steps_hides():
    """Both arms have the same weights there; afterwards the seeds wander by 1 %."""

    def factor(seed, steps):
        return np.where(steps == 0, 1.02, 1.0 + 0.01 * np.random.default_rng(seed).normal())

    result = l6(times(shifted(BASE), factor), shifted(BASE))
    assert (result.status, result.effect) == ("WARN", pytest.approx(1.02))
    later = l6(times(shifted(BASE), lambda s, steps: np.where(steps == 0, 1.0, 1.02)), shifted(BASE))
    assert (later.status, later.effect) == ("WARN", pytest.approx(1.02))


def test_the_weights_of_the_fp8_layers_are_compared_where_both_arms_have_them():
    """The whole model's norm dilutes 1.02 to 1.002."""
    candidate = times(times(shifted(BASE), 1.02, "fp8_grad_norm"), 1.002)
    golden = times(shifted(BASE), 1.0, "fp8_grad_norm")
    result = l6(candidate, golden)
    assert (result.status, result.effect) == ("WARN", pytest.approx(1.02))
    assert "weights of the FP8 layers" in result.sentence
    whole = l6(candidate, shifted(BASE))
    assert (whole.status, whole.effect) == ("PASS", pytest.approx(1.002))
    assert "dilutes" in whole.sentence


def test_only_seeds_of_both_arms_are_compared():
    golden = {s: r for s, r in shifted(BASE).items() if s != 2}
    candidate = times(shifted(BASE), lambda seed, steps: 1.05 if seed == 2 else 1.02)
    result = l6(candidate, golden)
    assert (result.effect, result.seeds) == (pytest.approx(1.02), 4)


def test_stored_rows_carry_the_norm_of_the_fp8_layers(tmp_path):
    base = control(steps=STEPS)
    rows = rows_of_runs("base", base)
    rows += rows_of_runs("tensorwise", times(shifted(base), 1.02, "fp8_grad_norm"))
    rows += rows_of_runs("tensorwise_golden", times(shifted(base), 1.0, "fp8_grad_norm"))
    found = {v.arm: v.verdict.gate("L6") for v in judge(frame(tmp_path, rows))}
    assert (found["tensorwise"].status, found["tensorwise"].effect) == ("WARN", pytest.approx(1.02))
    assert found["tensorwise_golden"].status == "PASS"
