"""Pages beside the report: two runs side by side (`diff RUN RUN -o FILE.html`), and a verdict on anyone's loss curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict.evidence import SIDES
from harness.judge.verdict.result import percent
from harness.report.drawing import (
    BAND,
    INK,
    SERIES,
    Chart,
    evenly,
    sheet,
    styled,
    ticks,
)  # fmt: skip
from harness.report.render import render_sections
from harness.report.section import Section
from harness.store.measurement import METRICS
from harness.store.printer import as_html
from harness.store.text import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from harness.judge.diff import RunChanges
    from harness.judge.verdict.rule import CurveVerdict

MOST_CURVES = 8
MOST_POINTS = 240  # of a line; more cannot be seen


def two_runs(found: RunChanges, frames: Sequence[pd.DataFrame]) -> str:
    """The page of what changed, with the rows of both runs."""
    charts = _curves(frames, found.names)
    shown = [Section("moved", "What moved", charts=charts)] if charts else []
    return render_sections(" and ".join(found.names), "Two runs side by side", "", shown, as_html(found))


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
    shown = Section("verdict", "What the curves show", charts=[_losses(found)])
    margin = f"margin {percent(found.margin)[1:]} of the base's loss"
    return render_sections(
        f"Trains the same: {found.outcome}", "Verdict on loss curves", margin, [shown], as_html(found)
    )


@styled
def _losses(found: CurveVerdict) -> Chart:
    """Each run over the mean of the base's, in percent, at steps of the base."""
    made, steps = sheet("curves", 3.6), found.sides[0][0].steps
    steps = steps[evenly(steps.size, MOST_POINTS)]
    sides = [np.array([np.interp(steps, r.steps, r.values) for r in runs]) for runs in found.sides]
    limit = 100 * found.margin
    made.axes.axhspan(-limit, limit, color=BAND, label="margin")
    styles: Any = {"color": INK, "linestyle": "--"}, {"color": SERIES[1]}
    for losses, name, look in zip(sides, SIDES, styles, strict=True):
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
