"""When a loss is reached. Oracles: straight lines, sums of step times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from curves_for_tests import STEPS, control

from harness.judge.verdict import Curve, Run, time_to_loss

BASE = control()


def _bare(runs):
    return {s: Run(r.loss, planned_steps=STEPS) for s, r in runs.items()}


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
