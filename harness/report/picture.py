"""Picture: the one figure of the first screen. On a GPU the speedup of each arm; on a CPU quality and bytes, never a speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.judge import gathered
from harness.report.drawing import (
    BAND,
    INK,
    LEAST_DB,
    MUTED,
    PAPER,
    Chart,
    forest,
    look,
    ratio_axis,
    ratio_limits,
    sheet,
    span,
    styled,
    svg,
    ticks,
)
from harness.report.records import SQNR, numerics_by_arm
from harness.report.standings import doubts, recipe, timed, unjudged
from harness.report.table import known
from harness.report.verdicts import STUDIES, tally, what_of
from harness.report.words import titled
from harness.store import text
from harness.store.case import Arm, arm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from harness.report.drawing import Sheet
    from harness.report.records import Worst
    from harness.report.runs import Machine
    from harness.report.standings import Standing

    Words = tuple[str, str, list[str]]  # name of a row, its verdict, what stands against it
    from harness.report.table import Row

MOST_ARMS, MOST_UNJUDGED, MOST_CASES = 10, 4, 12
BYTES = {"saved_bytes_per_elem": "kept for backward", "cast_bytes_per_elem": "moved by fused casts"}


def picture(machine: Machine) -> Chart | None:
    """The figure of a machine's first screen; None where there is nothing of the kind."""
    return _gains(machine) if machine.is_gpu else _quality(machine)


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of a drawing: inches across, inches a row, and whether names stand above their rows instead of beside them."""

    width: float
    row: float
    stacked: bool

    def sheet(self, rows: int, panels: int = 1) -> Sheet:
        """Panels side by side, or one below the other on a narrow screen, with room for so many rows each."""
        down = panels if self.stacked else 1
        height = down * (0.85 + self.row * max(rows, 2))
        shared: Any = {"width": self.width, "grid": "x", "sharey": not self.stacked}
        drawn = sheet("", height, panels // down, down, **shared)
        for axes in drawn.panels:
            axes.set_ylim(*((rows - 0.6, -0.75) if self.stacked else (rows - 0.4, -0.6)))
        return drawn


@styled
def _chart(machine: Machine, block: str, facts: Row, draw: Callable[[_Size], Sheet]) -> Chart:
    """The figure at both widths."""
    key = f"picture-{machine.env_id}"
    wide = svg(draw(_Size(9.2, 0.36, False)).figure, key)
    narrow = svg(draw(_Size(4.2, 0.52, True)).figure, f"{key}-narrow")
    title, caption = titled(f"figure_{block}", **facts)
    return Chart(key, title, wide, caption, narrow)


def _gains(machine: Machine) -> Chart | None:
    every = timed(machine)
    if not every:
        return None
    found, absent = every[:MOST_ARMS], unjudged(machine, every[0].suite)
    shown = absent[:MOST_UNJUDGED]
    against = {s.arm: doubts(machine, s.arm) for s in found}

    def draw(size: _Size) -> Sheet:
        rows = len(found) + len(shown)
        drawn = size.sheet(rows)
        axes, ends, words = drawn.axes, [1.0], []
        axes.axvline(1, color=INK, linewidth=0.9)
        for y, s in enumerate(found):
            why = against[s.arm]
            ends += _gain_row(axes, y, s, look(machine, s.fields, fillstyle="none" if why else "full"))
            verdicts = [p["verdict"] for p in s.pairs]
            # Without their numbers on a narrow screen, which leaves room for what stands against them.
            several = "mixed" if size.stacked and why else tally(verdicts)
            words.append(
                (s.arm, f"{text.ratio(s.gain)} {several if len(set(verdicts)) > 1 else verdicts[0]}", why)
            )
        ratio_axis(axes.xaxis, log=axes.set_xscale)
        axes.set(xlim=ratio_limits(ends), xlabel="speedup over bf16, same mode (log scale)")
        for y in range(len(found), rows):  # at the edge: a mark at 1 would read as a tie
            axes.plot([0.012], [y], marker="x", color=MUTED, transform=axes.get_yaxis_transform())
        words += [(u.arm, u.word, [text.short(text.reason(u.reason), 40)]) for u in shown]
        _label(axes, size, words)
        axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
        drawn.legend()
        return drawn

    facts = {
        "what": what_of(every[0].suite),
        "several": any(len(s.pairs) > 1 for s in found),
        "doubted": any(against.values()),
        "left": len(every) - len(found) + len(absent) - len(shown),
    }
    return _chart(machine, "gains", facts, draw)


def _gain_row(axes: Axes, y: float, standing: Standing, style: Row) -> list[float]:
    """Intervals of one arm's cases with the noise floors behind them; returns what the axis must hold."""
    ordered = sorted(standing.pairs, key=lambda p: p["speedup"])
    step = max(1, -(-len(ordered) // MOST_CASES))
    pairs = [*ordered[::step], *ordered[-1:]] if step > 1 else ordered
    ends, small = (
        [standing.gain],
        {"marker": "." * (len(pairs) > 1), "markersize": 3, "color": style["color"]},
    )
    for i, pair in enumerate(pairs):
        at, floor = y + 0.62 * ((i + 0.5) / len(pairs) - 0.5), pair["floor"]
        if known(floor):
            height = 0.62 / len(pairs)
            axes.barh(at, floor - 1 / floor, left=1 / floor, height=height, color=BAND, linewidth=0)
        ends += forest(axes, [(at, pair["speedup"], pair["low"], pair["high"])], small, 1.6)
    axes.plot([standing.gain], [y], **style | {"markersize": 7.5})
    return ends


def _quality(machine: Machine) -> Chart | None:
    judged = (w for w in numerics_by_arm(machine) if w.fp8 and w.judged and w.sqnr and w.suite not in STUDIES)
    by_recipe = gathered((recipe(w.fields), w) for w in judged if recipe(w.fields) != Arm())
    if not by_recipe:
        return None
    found = dict(list(by_recipe.items())[:MOST_ARMS])
    bytes_of: dict[Arm, dict[str, float]] = {}  # the most of each recipe, by metric
    for r in machine.pick(metric=BYTES, status="ok"):
        if math.isfinite(r["value"]):
            own = bytes_of.setdefault(recipe(arm_of(r)), {})
            own[r["metric"]] = max(r["value"], own.get(r["metric"], 0.0))
    kinds = [name for name in BYTES if any(name in bytes_of.get(arm, {}) for arm in found)]
    values, base = (
        [bytes_of.get(arm, {}) for arm in found],
        bytes_of.get(Arm("bf16"), {}).get("saved_bytes_per_elem"),
    )

    def draw(size: _Size) -> Sheet:
        drawn = size.sheet(len(found), 1 + bool(kinds))
        first, *more = drawn.panels
        words = [
            (str(arm), *_quality_row(first, y, every, look(machine, arm)))
            for y, (arm, every) in enumerate(found.items())
        ]
        span(first, LEAST_DB)
        first.set_xlabel("worst SQNR (dB), higher is better")
        first.plot([], [], color=INK, linewidth=1.6, label="least accepted")
        _label(first, size, words, beside=not more)
        for panel in more:
            _bytes_panel(panel, values, kinds, base, 0.08 * size.stacked)
            if size.stacked:
                _label(panel, size, [(str(arm), "", []) for arm in found])
        if not size.stacked:
            drawn.legend()
            return drawn
        for panel in drawn.panels:
            panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0, fontsize=7.5)
        return drawn

    return _chart(
        machine, "quality", {"kinds": [BYTES[k] for k in kinds], "left": len(by_recipe) - len(found)}, draw
    )


def _quality_row(axes: Axes, y: float, every: Sequence[Worst], style: Row) -> tuple[str, list[str]]:
    """The worst SQNR of a recipe with its bound; hollow where it fails or has no bound to pass."""
    least = min(every, key=lambda w: w.worst[1])
    metric, value = least.worst
    bound, failed = least.bounds.get(metric), any(w.failing for w in every)
    word = "BELOW ITS BOUND" if failed else "no bound" if bound is None else "passed"
    if bound is not None:
        axes.plot([bound] * 2, [y - 0.24, y + 0.24], color=INK, linewidth=1.6)
    if math.isfinite(value):
        axes.plot(
            [value], [y], **style | {"fillstyle": "full" if word == "passed" else "none", "markersize": 7.5}
        )
    return f"{text.number(value)} dB {word}", [f"{SQNR[metric]}, {least.suite}"]


def _bytes_panel(
    axes: Axes, values: Sequence[dict[str, float]], kinds: Sequence[str], base: float | None, down: float
) -> None:
    """Two bars a recipe from 0, so far below the middle of its row, and what bf16 keeps as a line."""
    for i, (kind, alpha) in enumerate(zip(kinds, (1.0, 0.45), strict=False)):
        at = [y + down + (0.18 - down / 2) * (2 * i - 1) * (len(kinds) > 1) for y in range(len(values))]
        widths = [own.get(kind, 0.0) for own in values]
        axes.barh(at, widths, height=0.3 - down, color=MUTED, alpha=alpha, label=BYTES[kind])
        for y, own, width in zip(at, values, widths, strict=True):
            said = text.number(own[kind]) if kind in own else "not measured" if not (own or i) else ""
            axes.annotate(said, (width, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    if base is not None:
        axes.axvline(base, color=INK, linewidth=0.9, linestyle="--", label="bf16 keeps")
    top = max((v for own in values for v in own.values()), default=1.0)
    axes.set(xlim=(0, 1.25 * max(top, base or 0.0)), xlabel="bytes an element, lower is better")
    ticks(axes.xaxis, 5, integer=True)


def _label(axes: Axes, size: _Size, words: Sequence[Words], beside: bool = True) -> None:
    """Names of the rows, with the verdict and what stands against it: beside the rows, or above each on a narrow screen."""
    about: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "color": INK}
    if size.stacked:
        axes.set_yticks([])
        about |= {
            "fontsize": 8.5,
            "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8},
        }  # lines end before the words
        for y, (name, verdict, more) in enumerate(words):
            room = max(len(verdict), 54 - len(name))
            tail = ": ".join(filter(None, (verdict, _fitting(more, room - len(verdict) - 2))))
            axes.text(0.012, y - 0.4, text.short(name, 30), **about)
            if tail:
                axes.text(1, y - 0.4, tail, ha="right", **about)
        return
    names = [text.short(n, 32) if beside else f"{text.short(n, 28)}\n{v}" for n, v, _ in words]
    axes.set_yticks(range(len(words)), names)
    for y, (_, verdict, more) in enumerate(words if beside else ()):
        axes.text(1.015, y - 0.19 * bool(more), verdict, **about)
        if more:
            axes.text(1.015, y + 0.21, _fitting(more, 44), **about | {"color": MUTED, "fontsize": 7.5})


def _fitting(said: Sequence[str], most: int) -> str:
    """Reasons in so many characters: the first ones and how many more; the middle of one alone is left out."""
    for kept in range(len(said), 0, -1):
        words = text.some(said, kept)
        if len(words) <= most:
            return words
    alone = f"{len(said)} doubts" if len(said) > 1 else "".join(said)
    return text.short(alone, most) if most >= 8 else ""
