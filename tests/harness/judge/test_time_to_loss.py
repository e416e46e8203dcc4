"""When a loss is reached. Oracles: straight lines, sums of step times."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from curves_for_tests import STEPS, control

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


@pytest.mark.parametrize("reached", [0, 10, 55])
def test_a_held_out_loss_after_r_updates_costs_the_time_of_r_steps(reached):
    """Oracle: steps of unequal length by hand: the first takes 5 s (it compiles), each later one 0.1 s."""
    run = dataclasses.replace(linear_run(0.1), elapsed=Curve.of(5 + 0.1 * np.arange(101)))
    (base,) = time_to_loss({"base": {0: run}}, target=3 - 0.01 * reached + 1e-12)
    assert base.steps[0] == pytest.approx(reached)
    assert base.seconds[0] == pytest.approx(5 + 0.1 * (reached - 1) if reached else 0.0)


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
