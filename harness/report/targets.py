"""Bars: what a training step in FP8 is asked for, and whether the steps of a machine give it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.judge.step_targets import held
from harness.report.table import Cell, Column, Table, make_table, number
from harness.store import text

if TYPE_CHECKING:
    from harness.judge.step_targets import Held
    from harness.report.runs import Machine

_STYLES = {"PASS": "faster", "FAIL": "slower", "INCONCLUSIVE": "unclear", "not measured": "muted"}


def bars_table(machine: Machine) -> Table:
    """A row a bar; none on a CPU, whose times are no speed, and where no step was timed."""
    found = held(machine.frame) if machine.is_gpu and "train" in machine.suites else []
    columns = (
        Column("arm", lambda one: one.bar.arm),
        Column("asked", lambda one: one.bar.words),
        Column("verdict", lambda one: Cell(one.outcome, one.outcome, _STYLES[one.outcome])),
        number("ratio", _ratio),
        Column("model", "model"),
    )
    return make_table(f"bars-{machine.env_id}", columns, found, sortable=False)


def _ratio(one: Held) -> Cell:
    if math.isnan(one.ratio):
        return Cell("", None, note=one.reason)
    return Cell(text.ratio(one.ratio), one.ratio, interval=text.interval(one.low, one.high))
