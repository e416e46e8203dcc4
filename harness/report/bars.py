"""Bars: what a training step in FP8 is asked for, and whether the steps of a machine give it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.judge.step_bars import held
from harness.report.table import Cell, Column, Table
from harness.store import text

if TYPE_CHECKING:
    from harness.report.runs import Machine

_STYLES = {"PASS": "faster", "FAIL": "slower", "INCONCLUSIVE": "unclear", "not measured": "muted"}


def bars_table(machine: Machine) -> Table:
    """A row a bar; none on a CPU, whose times are no speed, and where no step was timed."""
    found = held(machine.frame) if machine.is_gpu and "train" in machine.suites else []
    rows = []
    for one in found:
        known = not math.isnan(one.ratio)
        rows.append(
            (
                Cell(one.bar.arm, one.bar.arm),
                Cell(one.bar.words, one.bar.words),
                Cell(one.outcome, one.outcome, _STYLES[one.outcome]),
                Cell(text.ratio(one.ratio), one.ratio, interval=text.interval(one.low, one.high))
                if known
                else Cell("", None, note=one.reason),
                Cell(one.model, one.model),
            )
        )
    columns = (Column("arm"), Column("asked"), Column("verdict"), Column("ratio", True), Column("model"))
    return Table(f"bars-{machine.env_id}", columns, tuple(rows), sortable=False)
