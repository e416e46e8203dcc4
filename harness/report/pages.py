"""Pages beside the report: two runs side by side (`diff RUN RUN -o FILE.html`), and a verdict on anyone's loss curves."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.evidence import SIDES
from harness.judge.verdict.result import percent
from harness.report.drawing import (
    BAND,
    INK,
    MUTED,
    SERIES,
    Chart,
    evenly,
    forest,
    mark,
    ratio_axis,
    ratio_limits,
    sheet,
    styled,
    ticks,
)  # fmt: skip
from harness.report.render import render_sections
from harness.report.section import Section
from harness.report.table import Column, make_table, word
from harness.store.measurement import METRICS
from harness.store.printer import Cell, as_html
from harness.store.text import axes_of, case_label, constant_axes, short

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from harness.judge.diff import Changes
    from harness.judge.verdict.rule import CurveVerdict

MOST_RATIOS, MOST_CURVES = 40, 8
MOST_POINTS = 240  # of a line; more cannot be seen


def two_runs(found: Changes, frames: Sequence[pd.DataFrame]) -> str:
    """The page of what changed, with the rows of both runs."""
    charts = [*_ratios(found), *_curves(frames, found.names)]
    shown = [Section("moved", "What moved", charts=charts)] if charts else []
    return render_sections(" and ".join(found.names), "Two runs side by side", "", shown, as_html(found))


@styled
def _ratios(found: Changes) -> list[Chart]:
    names = found.names
    ranked = sorted(found.times, key=lambda t: -abs(math.log(t.ratio)))[:MOST_RATIOS]
    if not ranked:
        return []
    constant = constant_axes(t.axes for t in found.times)
    rows = [f"{short(case_label(axes_of(t.axes), constant), 40)} {t.arm}" for t in ranked]
    drawn = sheet("ratios", 1.0 + 0.26 * len(rows), grid="x", rows=rows)
    axes, ends = drawn.axes, list[float]()
    axes.axvline(1, color=INK, linewidth=0.9)
    for y, t in enumerate(ranked):
        colour = SERIES[1] if t.verdict in ("slower", "faster") else MUTED
        ends += forest(axes, [(y, t.ratio, t.low, t.high)], {"color": colour, "marker": "o"})
    ratio_axis(axes.xaxis, axes.set_xscale)
    axes.set_xlim(*ratio_limits(ends))
    axes.set_xlabel(
        f"time in {short(names[1], 40)} over {short(names[0], 40)}; above 1 is slower (log scale)"
    )
    left = (
        f"The {len(ranked)} of {len(found.times)} that moved most. " if len(ranked) < len(found.times) else ""
    )
    return [drawn.chart("Times", f"{left}Lines: 95 % intervals. Grey: not shown to have changed.")]


@styled
def _curves(frames: Sequence[pd.DataFrame], names: Sequence[str]) -> list[Chart]:
    """A figure a metric whose samples are a curve: a colour an arm, the first run dashed; means over cases and seeds."""
    made = []
    series = [name for name, metric in METRICS.items() if metric.series]
    curves = [
        frame[frame["metric"].isin(series) & (frame["status"] == "ok") & (frame["rounds"].map(len) > 1)]
        for frame in frames
    ]
    for metric in [m for m in series if all((frame["metric"] == m).any() for frame in curves)]:
        first, second = (frame[(frame["metric"] == metric) & (frame["part"] == "")] for frame in curves)
        arms = [arm for arm in dict.fromkeys(first["arm"]) if arm in set(second["arm"])]
        if not arms:
            continue
        drawn = sheet(f"curve-{metric}", 3.6, grid="y")
        for i, arm in enumerate(arms[:MOST_CURVES]):
            for frame, style, label in ((first, "--", ""), (second, "-", short(arm, 24))):
                own = frame[frame["arm"] == arm].explode(["rounds", "samples"])
                mean = own.astype({"samples": float}).groupby("rounds")["samples"].mean()
                drawn.axes.plot(
                    np.asarray(mean.index, float), mean, style, color=SERIES[i], linewidth=1.0, label=label
                )
        drawn.axes.set(xlabel="step", ylabel=f"{metric} ({METRICS[metric].unit})")
        left = f" The first {MOST_CURVES} of {len(arms)} arms." if len(arms) > MOST_CURVES else ""
        made.append(
            drawn.chart(metric, f"Means over cases and seeds; dashed: {names[0]}, drawn: {names[1]}.{left}")
        )
    return made


# A verdict on loss curves


def curve_verdict(found: CurveVerdict) -> str:
    """The HTML of a verdict."""
    said = {"because": found.reasons, "beside it": found.notes, "read": found.read}
    rows = [
        ("verdict", word(found.outcome)),
        *((name, Cell(line)) for name, lines in said.items() for line in lines),
    ]
    about = make_table(
        "curves", [Column("what", itemgetter(0)), Column("", itemgetter(1))], rows, sortable=False
    )
    shown = Section("verdict", "What the curves show", first=[about], charts=[_losses(found)])
    margin = f"margin {percent(found.margin)[1:]} of the base's loss"
    return render_sections(f"Trains the same: {found.outcome}", "Verdict on loss curves", margin, [shown])


@styled
def _losses(found: CurveVerdict) -> Chart:
    """Each run over the mean of the base's, in percent, at steps of the base."""
    made, steps = sheet("curves", 3.6), found.sides[0][0].steps
    steps = steps[evenly(steps.size, MOST_POINTS)]
    sides = [np.array([np.interp(steps, r.steps, r.values) for r in runs]) for runs in found.sides]
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
