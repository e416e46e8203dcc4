"""Picture: the one figure of the first screen. On a GPU the speedup of each arm; on a CPU its quality, never a speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.judge import gathered
from harness.report.drawing import (
    BAND,
    INK,
    LEAST_DB,
    MUTED,
    Chart,
    bands,
    forest,
    look,
    ratio_axis,
    ratio_limits,
    sheet,
    span,
    styled,
)
from harness.report.records import SQNR, numerics_by_arm
from harness.report.standings import doubts, recipe, timed, unjudged
from harness.report.verdicts import STUDIES, least, tally, what_of
from harness.store import text
from harness.store.case import Arm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from harness.report.drawing import Sheet
    from harness.report.runs import Machine
    from harness.report.standings import Standing
    from harness.report.table import Row

    Words = tuple[str, str, list[str]]  # name of a row, its verdict, what stands against it

MOST_ARMS, MOST_UNJUDGED, MOST_CASES = 10, 4, 12


def picture(machine: Machine) -> Chart | None:
    """The figure of a machine's first screen; None where there is nothing of the kind."""
    return _gains(machine) if machine.is_gpu else _quality(machine)


@styled
def _gains(machine: Machine) -> Chart | None:
    every = timed(machine)
    if not every:
        return None
    found, absent = every[:MOST_ARMS], unjudged(machine, every[0].suite)
    shown = absent[:MOST_UNJUDGED]
    against = [doubts(machine, s.arm) for s in found]
    drawn = _sheet(machine, len(found) + len(shown))
    axes, ends = drawn.axes, [1.0]
    words: list[Words] = []
    axes.axvline(1, color=INK, linewidth=0.9)
    for y, (s, why) in enumerate(zip(found, against, strict=True)):
        ends += _gain_row(axes, y, s, look(machine, s.fields, fillstyle="none" if why else "full"))
        verdicts = [p["verdict"] for p in s.pairs]
        told = tally(verdicts) if len(set(verdicts)) > 1 else verdicts[0]
        words.append((s.arm, told, why))
    ratio_axis(axes.xaxis, log=axes.set_xscale)
    axes.set(xlim=ratio_limits(ends), xlabel="speedup over bf16, same mode (log scale)")
    for y in range(len(found), len(found) + len(shown)):  # at the edge: a mark at 1 would read as a tie
        axes.plot([0.012], [y], marker="x", color=MUTED, transform=axes.get_yaxis_transform())
    words += [(u.arm, u.word, [text.short(text.reason(u.reason), 40)]) for u in shown]
    _label(axes, words)
    axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
    left = len(every) - len(found) + len(absent) - len(shown)
    said = [
        "Right of 1 FP8 is faster. Lines: 95 % intervals over rounds"
        + ", one a case; large marks: geometric means over cases" * any(len(s.pairs) > 1 for s in found),
        "Grey: how far one arm timed twice seems apart",
        *["Hollow: in doubt, as said beside it"] * any(against),
        *[f"{text.plural(left, 'more arm')} below"] * bool(left),
    ]
    return drawn.chart(f"Speedup over bf16, {what_of(every[0].suite)}", f"{'. '.join(said)}.")


def _sheet(machine: Machine, rows: int) -> Sheet:
    drawn = sheet(f"picture-{machine.env_id}", 0.85 + 0.36 * max(rows, 2), width=9.2, grid="x")
    drawn.axes.set_ylim(rows - 0.4, -0.6)
    return drawn


def _gain_row(axes: Axes, y: float, standing: Standing, style: Row) -> list[float]:
    """Intervals of one arm's cases with the noise floors behind them; returns what the axis must hold."""
    ordered = sorted(standing.pairs, key=lambda p: p["speedup"])
    step = max(1, -(-len(ordered) // MOST_CASES))
    pairs = [*ordered[::step], *ordered[-1:]] if step > 1 else ordered
    dot = "." if len(pairs) > 1 else ""
    small = {"marker": dot, "markersize": 3, "color": style["color"], "linestyle": "none"}
    ends = [standing.gain]
    places = [y + 0.62 * ((i + 0.5) / len(pairs) - 0.5) for i in range(len(pairs))]
    bands(axes, zip(places, (p["floor"] for p in pairs), strict=True), 0.62 / len(pairs))
    points = [(at, p["speedup"], p["low"], p["high"]) for at, p in zip(places, pairs, strict=True)]
    ends += forest(axes, points, small, 1.6)
    axes.plot([standing.gain], [y], **style | {"markersize": 7.5})
    return ends


@styled
def _quality(machine: Machine) -> Chart | None:
    """The worst SQNR of each recipe with its bound; hollow where it fails or has no bound to pass."""
    judged = (w for w in numerics_by_arm(machine) if w.fp8 and w.judged and w.sqnr and w.suite not in STUDIES)
    by_recipe = gathered((recipe(w.fields), w) for w in judged if recipe(w.fields) != Arm())
    if not by_recipe:
        return None
    found = list(by_recipe.items())[:MOST_ARMS]
    drawn = _sheet(machine, len(found))
    words: list[Words] = []
    for y, (arm, every) in enumerate(found):
        worst = least(every)
        metric, value = worst.worst
        bound, failed = worst.bounds.get(metric), any(w.failing for w in every)
        word = "BELOW ITS BOUND" if failed else "no bound" if bound is None else "passed"
        style = look(machine, arm, fillstyle="full" if word == "passed" else "none", markersize=7.5)
        drawn.axes.plot([value], [y], **style)
        if bound is not None:
            drawn.axes.plot([bound] * 2, [y - 0.24, y + 0.24], color=INK, linewidth=1.6)
        words.append((str(arm), f"{text.number(value)} dB {word}", [f"{SQNR[metric]}, {worst.suite}"]))
    span(drawn.axes, LEAST_DB)
    drawn.axes.set_xlabel("worst SQNR (dB), higher is better")
    drawn.axes.plot([], [], color=INK, linewidth=1.6, label="least accepted")
    _label(drawn.axes, words)
    left = len(by_recipe) - len(found)
    said = "Worst SQNR of each recipe over its checked arms and results; 6 dB are one bit. Hollow: not passed or no bound."
    more = f" {text.plural(left, 'more recipe')} below." * bool(left)
    return drawn.chart("Quality of each recipe (measured on a CPU: no speed)", said + more)


def _label(axes: Axes, words: Sequence[Words]) -> None:
    """Names of the rows, with the verdict and what stands against it beside them."""
    about: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "color": INK}
    axes.set_yticks(range(len(words)), [text.short(name, 32) for name, *_ in words])
    for y, (_, verdict, more) in enumerate(words):
        axes.text(1.015, y - 0.19 * bool(more), verdict, **about)
        if more:
            axes.text(1.015, y + 0.21, _fitting(more, 44), **about | {"color": MUTED, "fontsize": 7.5})


def _fitting(said: Sequence[str], most: int) -> str:
    """Reasons in so many characters: the first ones and how many more; the middle of one alone is left out."""
    shown = (text.some(said, kept) for kept in range(len(said), 0, -1))
    return next((words for words in shown if len(words) <= most), text.short(text.some(said, 1), most))
