"""When a loss is reached. Oracles: straight lines, sums of step times."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from curves_for_tests import STEPS, control, shifted

from harness.judge.verdict import Curve, Run, time_to_loss

BASE = control()


def _bare(runs):
    return {s: Run(r.loss, planned_steps=STEPS) for s, r in runs.items()}


def linear_run(step_s: float, slope: float = 0.01, steps: int = 101) -> Run:
    """Held-out loss 3 - slope t, every ten steps."""
    t = np.arange(0, steps, 10, dtype=float)
    return Run(
        Curve.of(3 - slope * np.arange(steps)),
        heldout=Curve(t, 3 - slope * t),
        elapsed=Curve.of(step_s * (1 + np.arange(steps))),
    )


def test_time_to_loss_of_straight_lines():
    """Oracle: 3 - 0.01 t reaches 2.45 after 55 updates, which take 55 steps' time; half of it where a step takes half."""
    arms = {"base": {s: linear_run(0.2) for s in range(3)}, "fast": {s: linear_run(0.1) for s in range(3)}}
    base, fast = time_to_loss(arms, target=2.45)
    assert list(base.steps.values()) == pytest.approx([55.0] * 3)
    assert list(fast.seconds.values()) == pytest.approx([5.5] * 3)
    assert fast.step_ratio.speedup == pytest.approx(1.0)
    assert fast.second_ratio.speedup == pytest.approx(2.0)
    assert base.step_ratio is None
    assert base.curve == "held-out loss"


@pytest.mark.parametrize("reached", [0, 10, 55])
def test_a_held_out_loss_after_r_updates_costs_the_time_of_r_steps(reached):
    """Oracle: steps of unequal length by hand: the first takes 5 s (it compiles), each later one 0.1 s."""
    run = dataclasses.replace(linear_run(0.1), elapsed=Curve.of(5 + 0.1 * np.arange(101)))
    (base,) = time_to_loss({"base": {0: run}}, target=3 - 0.01 * reached + 1e-12)
    assert base.steps[0] == pytest.approx(reached)
    assert base.seconds[0] == pytest.approx(5 + 0.1 * (reached - 1) if reached else 0.0)


def test_a_training_loss_at_s_costs_the_time_until_that_step_ended():
    """Oracle: a smoothed constant crosses at once, and the first step has ended after 5 s."""
    run = Run(Curve.of(np.full(101, 2.0)), elapsed=Curve.of(5 + 0.1 * np.arange(101)))
    (base,) = time_to_loss({"base": {0: run}}, target=2.5)
    assert (base.steps[0], base.seconds[0]) == (0.0, 5.0)


def test_the_default_target_is_reached_by_every_control_run():
    arms = {"base": {0: linear_run(0.2), 1: linear_run(0.2, slope=0.008)}}
    (base,) = time_to_loss(arms)
    assert base.target == pytest.approx(2.2 * 1.0025)
    assert base.reached == 2


def test_not_reached_is_a_result_and_has_no_ratio():
    arms = {"base": {s: linear_run(0.2) for s in range(3)}}
    arms["slow"] = {s: linear_run(0.2, slope=0.01 if s else 0.001) for s in range(3)}
    slow = time_to_loss(arms, target=2.45)[1]
    assert math.isnan(slow.steps[0])
    assert slow.reached == 2
    assert slow.step_ratio is None


def test_without_held_out_curves_the_smoothed_training_loss_counts():
    (base, worse) = time_to_loss({"base": _bare(BASE), "worse": _bare(shifted(BASE, 0.3))})
    assert base.curve == "smoothed training loss"
    assert base.reached == 5
    assert worse.reached == 0
    assert all(math.isnan(s) for s in base.seconds.values())


def test_time_to_loss_without_a_control_or_a_target_is_refused_or_empty():
    assert time_to_loss({"tensorwise": BASE}) == []
    with pytest.raises(ValueError, match="must be a finite loss"):
        time_to_loss({"base": BASE}, target=math.inf)


def test_a_run_that_broke_counts_up_to_its_nan():
    loss = BASE[0].loss.values.copy()
    loss[50:] = math.nan
    broken = {0: Run(Curve.of(loss), planned_steps=STEPS)}
    at_once = {0: Run(Curve.of(np.full(60, math.nan)))}
    reach = time_to_loss({"base": _bare({0: BASE[0]}), "broken": broken, "at_once": at_once})
    assert [r.reached for r in reach] == [1, 0, 0]
