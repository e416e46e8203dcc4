"""Picture: the one figure of the first screen. On a GPU the speedup of each arm; on a CPU its quality, never a speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report.drawing import (
    BAND,
    INK,
    LEAST_DB,
    Chart,
    bands,
    evenly,
    forest,
    look,
    ratio_axis,
    ratio_limits,
    sheet,
    span,
    styled,
)
from harness.report.records import numerics_by_arm
from harness.report.standings import doubts, recipe, timed
from harness.report.verdicts import least, tally, what_of
from harness.store import text
from harness.store.case import Arm
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from harness.report.drawing import Sheet
    from harness.report.runs import Machine
    from harness.report.standings import Standing
    from harness.report.table import Row

MOST_ARMS, MOST_CASES = 10, 12


def picture(machine: Machine) -> Chart | None:
    """The figure of a machine's first screen; None where there is nothing of the kind."""
    return _gains(machine) if machine.is_gpu else _quality(machine)


@styled
def _gains(machine: Machine) -> Chart | None:
    every = timed(machine)
    if not every:
        return None
    found = every[:MOST_ARMS]
    against = [doubts(machine, s.arm) for s in found]
    verdicts = [[p["verdict"] for p in s.pairs] for s in found]
    tallies = [tally(own) if len(own) > 1 else own[0] for own in verdicts]
    rows = [f"{text.short(s.arm, 32)}\n{each}" for s, each in zip(found, tallies, strict=True)]
    drawn = _sheet(machine, rows)
    axes, ends = drawn.axes, [1.0]
    axes.axvline(1, color=INK, linewidth=0.9)
    for y, (s, why) in enumerate(zip(found, against, strict=True)):
        ends += _gain_row(axes, y, s, look(machine, s.fields, fillstyle="none" if why else "full"))
    ratio_axis(axes.xaxis, log=axes.set_xscale)
    axes.set(xlim=ratio_limits(ends), xlabel="speedup over bf16, same mode (log scale)")
    axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
    left = len(every) - len(found)
    caption = [
        "Right of 1 FP8 is faster. Lines: 95 % intervals over rounds"
        + ", one a case; large marks: geometric means over cases" * any(len(s.pairs) > 1 for s in found),
        "Grey: how far one arm timed twice seems apart",
        *["Hollow: in doubt, as the table says"] * any(against),
        *[f"{text.plural(left, 'more arm')} below"] * bool(left),
    ]
    return drawn.chart(f"Speedup over bf16, {what_of(every[0].suite)}", f"{'. '.join(caption)}.")


def _sheet(machine: Machine, rows: Sequence[str]) -> Sheet:
    height = 0.85 + 0.36 * max(len(rows), 2)
    return sheet(f"picture-{machine.env_id}", height, width=9.2, grid="x", rows=rows)


def _gain_row(axes: Axes, y: float, standing: Standing, style: Row) -> list[float]:
    """Intervals of one arm's cases with the noise floors behind them; returns what the axis must hold."""
    ordered = sorted(standing.pairs, key=lambda p: p["speedup"])
    pairs = [ordered[i] for i in evenly(len(ordered), MOST_CASES)]
    dot = "." if len(pairs) > 1 else ""
    small = {"marker": dot, "markersize": 3, "color": style["color"], "linestyle": "none"}
    ends = [standing.gain]
    heights = [y + 0.62 * ((i + 0.5) / len(pairs) - 0.5) for i in range(len(pairs))]
    bands(axes, zip(heights, (p["floor"] for p in pairs), strict=True), 0.62 / len(pairs))
    points = [(at, p["speedup"], p["low"], p["high"]) for at, p in zip(heights, pairs, strict=True)]
    ends += forest(axes, points, small, 1.6)
    axes.plot([standing.gain], [y], **style | {"markersize": 7.5})
    return ends


@styled
def _quality(machine: Machine) -> Chart | None:
    """The worst SQNR of each recipe with its bound; hollow where it fails or has no bound to pass."""
    judged = (w for w in numerics_by_arm(machine) if w.fp8 and w.proves and w.sqnr)
    by_recipe = grouped((recipe(w.fields), w) for w in judged if recipe(w.fields) != Arm())
    if not by_recipe:
        return None
    found = list(by_recipe.items())[:MOST_ARMS]
    rows: list[str] = []
    marks: list[tuple[float, float | None, Row]] = []
    for arm, every in found:
        worst = least(every)
        metric, value = worst.worst
        bound, failed = worst.bounds.get(metric), any(w.failing for w in every)
        word = "BELOW ITS BOUND" if failed else "passed" if all(w.passed for w in every) else "no bound"
        style = look(machine, arm, fillstyle="full" if word == "passed" else "none", markersize=7.5)
        rows.append(f"{text.short(str(arm), 32)}\n{text.number(value)} dB {word}")
        marks.append((value, bound, style))
    drawn = _sheet(machine, rows)
    for y, (value, bound, style) in enumerate(marks):
        drawn.axes.plot([value], [y], **style)
        if bound is not None:
            drawn.axes.plot([bound] * 2, [y - 0.24, y + 0.24], color=INK, linewidth=1.6)
    span(drawn.axes, LEAST_DB)
    drawn.axes.set_xlabel("worst SQNR (dB), higher is better")
    drawn.axes.plot([], [], color=INK, linewidth=1.6, label="least accepted")
    left = len(by_recipe) - len(found)
    caption = "Worst SQNR of each recipe over its checked arms and results; 6 dB are one bit. Hollow: not passed or no bound."
    more = f" {text.plural(left, 'more recipe')} below." * bool(left)
    return drawn.chart("Quality of each recipe (measured on a CPU: no speed)", caption + more)
