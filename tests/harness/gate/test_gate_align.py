"""Log ratios round by round. Oracle: numpy's logarithm of medians, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from harness.gate.align import fill_rounds
from harness.gate.policy import Rule
from harness.gate.sides import FIRST
from harness.gate.unit import Unit


@pytest.mark.parametrize(("better", "sign"), [("lower", 1.0), ("higher", -1.0)])
def test_a_positive_log_ratio_is_worse_whatever_is_better(better: str, sign: float) -> None:
    before = SimpleNamespace(samples=[1.0, 2.0, 3.0, 8.0], rounds=[1, 1, 2, 2])
    after = SimpleNamespace(samples=[3.0, 3.0, 11.0, 11.0], rounds=[1, 1, 2, 2])
    unit = Unit("s", "c", "c", "a", "m", "", "", "1", better, Rule("timed", 0.05), rows=([before], [after]))
    fill_rounds([unit], FIRST, by_number=True)
    np.testing.assert_allclose(unit.first, sign * np.log([3.0 / 1.5, 11.0 / 5.5]))
