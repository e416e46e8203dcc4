"""Page of a verdict on anyone's curves: the answer, what it rests on, every run against the base's mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.result import percent
from harness.report.drawing import BAND, INK, Chart, evenly, mark, sheet, styled, ticks
from harness.report.render import render_sections
from harness.report.section import Section
from harness.report.table import Cell, Column, make_table, word

if TYPE_CHECKING:
    from harness.judge.curve_verdict import CurveVerdict

MOST_POINTS = 240  # of a line; more cannot be seen
MOST_RUNS = 60


def page(found: CurveVerdict) -> str:
    """The HTML of a verdict."""
    rows = [("verdict", word(found.outcome))]
    for name, lines in (("because", found.reasons), ("beside it", found.notes), ("read", found.read)):
        rows += [(name, Cell(line)) for line in lines]
    about = make_table(
        "curves", [Column("what", lambda row: row[0]), Column("", lambda row: row[1])], rows, sortable=False
    )
    counts = " against ".join(f"{len(runs)}" for runs in reversed(found.sides))
    shown = Section("verdict", "What the curves show", first=[about], charts=[_chart(found)])
    subtitle = f"{counts} runs, margin {percent(found.margin)[1:]} of the base's loss"
    return render_sections(f"Trains the same: {found.outcome}", "Verdict on loss curves", subtitle, [shown])


@styled
def _chart(found: CurveVerdict) -> Chart:
    """Each run over the mean of the base's, in percent, at the base's steps."""
    made = sheet("curves", 3.6)
    steps = found.sides[0][0].curve.steps
    steps = steps[evenly(steps.size, MOST_POINTS)]
    of = [[np.interp(steps, r.curve.steps, r.curve.values) for r in runs[:MOST_RUNS]] for runs in found.sides]
    mean = np.mean([line for line in of[0] if np.isfinite(line).all()] or of[0], axis=0)
    limit = 100 * found.margin
    made.axes.axhspan(-limit, limit, color=BAND, label="margin")
    for i, (lines, name) in enumerate(zip(of, ("base", "candidate"), strict=True)):
        look = (
            mark(i, linestyle="-", linewidth=0.7)
            if i
            else {"color": INK, "linestyle": "--", "linewidth": 0.7}
        )
        for k, line in enumerate(lines):
            made.axes.plot(steps, 100 * (line / mean - 1), label=name if not k else "", **look)
    late = [100 * (line / mean - 1)[steps.size // 2 :] for lines in of for line in lines]
    most = np.nanmax(np.abs(np.concatenate(late)), initial=4 * limit, where=np.isfinite(np.concatenate(late)))
    made.axes.set_ylim(-most, most)
    made.axes.set(xlabel=found.sides[0][0].columns[1], ylabel="loss over the base's mean - 1, %")
    ticks(made.axes.yaxis, 7, signed=True)
    return made.chart(
        "Every run against the base's mean",
        "Scaled to the second half of the steps; early values may lie beyond.",
    )
