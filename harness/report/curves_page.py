"""Page of a verdict on anyone's curves: the answer, what it rests on, every run against the base's mean."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.curve_verdict import SIDES
from harness.judge.verdict.result import percent
from harness.report.drawing import BAND, INK, Chart, evenly, mark, sheet, styled, ticks
from harness.report.render import render_sections
from harness.report.section import Section
from harness.report.table import Cell, Column, make_table, word

if TYPE_CHECKING:
    from harness.judge.curve_verdict import CurveVerdict

MOST_POINTS = 240  # of a line; more cannot be seen


def page(found: CurveVerdict) -> str:
    """The HTML of a verdict."""
    said = {"because": found.reasons, "beside it": found.notes, "read": found.read}
    rows = [
        ("verdict", word(found.outcome)),
        *((name, Cell(line)) for name, lines in said.items() for line in lines),
    ]
    about = make_table(
        "curves", [Column("what", itemgetter(0)), Column("", itemgetter(1))], rows, sortable=False
    )
    shown = Section("verdict", "What the curves show", first=[about], charts=[_chart(found)])
    margin = f"margin {percent(found.margin)[1:]} of the base's loss"
    return render_sections(f"Trains the same: {found.outcome}", "Verdict on loss curves", margin, [shown])


@styled
def _chart(found: CurveVerdict) -> Chart:
    """Each run over the mean of the base's, in percent, at steps of the base."""
    made, steps = sheet("curves", 3.6), found.sides[0][0].curve.steps
    steps = steps[evenly(steps.size, MOST_POINTS)]
    sides = [
        np.array([np.interp(steps, r.curve.steps, r.curve.values) for r in runs]) for runs in found.sides
    ]
    limit = 100 * found.margin
    made.axes.axhspan(-limit, limit, color=BAND, label="margin")
    looks = {"color": INK, "linestyle": "--"}, mark(1, linestyle="-")
    for losses, name, look in zip(sides, SIDES, looks, strict=True):
        gaps = np.ma.masked_invalid(100 * (losses / np.ma.masked_invalid(sides[0]).mean(axis=0) - 1))
        limit = max(limit, 400 * found.margin, float(np.ma.max(np.abs(gaps[:, steps.size // 2 :])) or 0))
        made.axes.plot(steps, gaps.T, label=[name, *[""] * (len(losses) - 1)], linewidth=0.7, **look)
    made.axes.set(
        xlabel=found.sides[0][0].columns[1], ylabel="loss over the base's mean - 1, %", ylim=(-limit, limit)
    )
    ticks(made.axes.yaxis, 7, signed=True)
    return made.chart(
        "Every run against the base's mean",
        "Scaled to the second half of the steps; early values may lie beyond.",
    )
