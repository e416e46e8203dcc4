"""Picture: the one figure of the first screen. On a GPU the speedup of each arm; on a CPU quality and bytes, never a speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from harness.report.doubts import Unjudged, doubts, unjudged
from harness.report.drawing import (
    BAND,
    INK,
    LEAST_DB,
    MUTED,
    PAPER,
    Chart,
    Sheet,
    ratio_axis,
    ratio_limits,
    sheet,
    span,
    styled,
    svg,
)
from harness.report.headline import recipe, standings
from harness.report.looks import look
from harness.report.numerics import SQNR, numerics_by_arm
from harness.report.soundness import STUDIES
from harness.report.verdicts import VERDICTS, what_of
from harness.store import text
from harness.store.arm import Arm, arm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from harness.report.headline import Standing
    from harness.report.numerics import Worst
    from harness.report.runs import Machine

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


WIDE, NARROW = _Size(9.2, 0.36, False), _Size(4.2, 0.52, True)


@styled
def _chart(machine: Machine, title: str, caption: str, draw: Callable[[_Size], Sheet]) -> Chart:
    """The figure at both widths."""
    drawn = []
    key = f"picture-{machine.env_id}"
    for size, name in ((WIDE, key), (NARROW, f"{key}-narrow")):
        drawn.append(svg(draw(size).figure, name))
    return Chart(key, title, drawn[0], caption, drawn[1])


def _gains(machine: Machine) -> Chart | None:
    found = [s for s in standings(machine) if s.pairs][:MOST_ARMS]
    if not found:
        return None
    suite = found[0].suite
    absent = unjudged(machine, suite)
    shown = absent[:MOST_UNJUDGED]
    against = {s.arm: doubts(machine, s) for s in found}
    several = any(len(s.pairs) > 1 for s in found)
    caption = "Right of 1 FP8 is faster. Lines: 95 % intervals over rounds" + (
        ", one a case; large marks: geometric means over cases." if several else "."
    )
    caption += " Grey: how far one arm timed twice seems apart." + (
        " Hollow: in doubt, as said beside it." if any(against.values()) else ""
    )
    left = len([s for s in standings(machine) if s.pairs]) - len(found) + len(absent) - len(shown)
    caption += f" {text.plural(left, 'more arm')} below." if left else ""

    def draw(size: _Size) -> Sheet:
        rows = len(found) + len(shown)
        drawn = _panels(size, rows, 1)
        axes = drawn.axes
        axes.axvline(1, color=INK, linewidth=0.9)
        ends = [1.0]
        for y, standing in enumerate(found):
            ends += _gain_row(axes, y, standing, look(machine, standing.fields), bool(against[standing.arm]))
        ratio_axis(axes.xaxis, log=axes.set_xscale)
        axes.set_xlim(*ratio_limits(ends))
        axes.set_xlabel("speedup over bf16, same mode (log scale)")
        for y in range(len(found), rows):  # at the edge: a mark at 1 would read as a tie
            axes.plot([0.012], [y], marker="x", color=MUTED, transform=axes.get_yaxis_transform())
        words = [
            (s.arm, _gain_words(s, size.stacked and bool(against[s.arm])), against[s.arm]) for s in found
        ] + [_absent_words(u) for u in shown]
        _label(axes, size, words)
        axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
        drawn.legend()
        return drawn

    return _chart(machine, f"Speedup over bf16, {what_of(suite)}", caption, draw)


def _gain_row(axes: Axes, y: float, standing: Standing, style: dict[str, Any], doubted: bool) -> list[float]:
    """Intervals of one arm's cases with the noise floors behind them; returns what the axis must hold."""
    ordered = sorted(standing.pairs, key=lambda p: p["speedup"])
    step = max(1, -(-len(ordered) // MOST_CASES))
    pairs = [*ordered[::step], *ordered[-1:]] if step > 1 else ordered
    ends = [standing.gain]
    for i, pair in enumerate(pairs):
        at = y + (0.62 * ((i + 0.5) / len(pairs) - 0.5) if len(pairs) > 1 else 0.0)
        floor = pair["floor"]
        if floor == floor:
            height = 0.62 / len(pairs)
            axes.barh(at, floor - 1 / floor, left=1 / floor, height=height, color=BAND, linewidth=0)
        known = [v for v in (pair["low"], pair["high"]) if v == v]
        if known:
            axes.hlines(at, *known, color=style["color"], linewidth=1.6)
        if len(pairs) > 1:
            axes.plot([pair["speedup"]], [at], marker=".", markersize=3, color=style["color"])
        ends += [pair["speedup"], *known]
    fill = "none" if doubted else "full"
    axes.plot([standing.gain], [y], **style | {"fillstyle": fill, "markersize": 7.5})
    return ends


def _gain_words(standing: Standing, brief: bool) -> str:
    """Gain and verdicts; brief: without their numbers, which leaves room for what stands against them."""
    verdicts = [p["verdict"] for p in standing.pairs]
    counts = {v: verdicts.count(v) for v in VERDICTS if v in verdicts}
    several = "mixed" if brief else ", ".join(f"{n} {v}" for v, n in counts.items())
    return f"{text.ratio(standing.gain)} {next(iter(counts)) if len(counts) == 1 else several}"


def _absent_words(absent: Unjudged) -> tuple[str, str, list[str]]:
    return absent.arm, absent.word, [text.short(text.reason(absent.reason), 40)]


def _quality(machine: Machine) -> Chart | None:
    by_recipe: dict[Arm, list[Worst]] = {}
    for w in numerics_by_arm(machine):
        computed = recipe(w.fields)
        if w.fp8 and w.judged and w.sqnr and w.suite not in STUDIES and computed != Arm():
            by_recipe.setdefault(computed, []).append(w)
    if not by_recipe:
        return None
    found = dict(list(by_recipe.items())[:MOST_ARMS])
    bytes_of = _bytes(machine)
    kinds = [name for name in BYTES if any(name in bytes_of.get(arm, {}) for arm in found)]
    base = bytes_of.get(Arm("bf16"), {}).get("saved_bytes_per_elem")
    caption = "Worst SQNR of each recipe over its checked arms and results; 6 dB are one bit. Hollow: not passed or no bound."
    caption += (
        f" Bytes an element: {' and '.join(BYTES[k] for k in kinds)}."
        if kinds
        else " Bytes an element were not measured in these runs (sweep=recipes)."
    )
    left = len(by_recipe) - len(found)
    caption += f" {text.plural(left, 'more recipe')} below." if left else ""

    def draw(size: _Size) -> Sheet:
        drawn = _panels(size, len(found), 1 + bool(kinds))
        panels, words = drawn.panels, []
        for y, (arm, every) in enumerate(found.items()):
            words.append((str(arm), *_quality_row(panels[0], y, every, look(machine, arm))))
        span(panels[0], LEAST_DB)
        panels[0].set_xlabel("worst SQNR (dB), higher is better")
        panels[0].plot([], [], color=INK, linewidth=1.6, label="least accepted")
        _label(panels[0], size, words, beside=len(panels) == 1)
        if kinds:
            _bytes_panel(
                panels[1], [bytes_of.get(arm, {}) for arm in found], kinds, base, 0.08 * size.stacked
            )
            if size.stacked:
                _label(panels[1], size, [(str(arm), "", []) for arm in found])
        for panel in panels if size.stacked else []:
            panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0, fontsize=7.5)
        if not size.stacked:
            drawn.legend()
        return drawn

    title = "Quality and bytes of each recipe" if kinds else "Quality of each recipe"
    return _chart(machine, f"{title} (measured on a CPU: no speed)", caption, draw)


def _quality_row(
    axes: Axes, y: float, every: Sequence[Worst], style: dict[str, Any]
) -> tuple[str, list[str]]:
    """The worst SQNR of a recipe with its bound; hollow where it fails or has no bound to pass."""
    least = min(every, key=lambda w: w.worst[1])
    metric, value = least.worst
    bound = least.bounds.get(metric)
    failed = any(w.below(m) for w in every for m in w.sqnr)
    settled = bound is not None and not failed
    if bound is not None:
        axes.plot([bound] * 2, [y - 0.24, y + 0.24], color=INK, linewidth=1.6)
    if math.isfinite(value):
        axes.plot([value], [y], **style | {"fillstyle": "full" if settled else "none", "markersize": 7.5})
    word = "BELOW ITS BOUND" if failed else "passed" if settled else "no bound"
    return f"{text.number(value)} dB {word}", [f"{SQNR[metric]}, {least.suite}"]


def _bytes(machine: Machine) -> dict[Arm, dict[str, float]]:
    """Most bytes an element of each recipe, by metric of `BYTES`."""
    found: dict[Arm, dict[str, float]] = {}
    for r in machine.rows:
        if r["metric"] in BYTES and r["status"] == "ok" and math.isfinite(r["value"]):
            own = found.setdefault(recipe(arm_of(r)), {})
            own[r["metric"]] = max(r["value"], own.get(r["metric"], 0.0))
    return found


def _bytes_panel(
    axes: Axes, values: Sequence[dict[str, float]], kinds: Sequence[str], base: float | None, down: float
) -> None:
    """Two bars a recipe from 0, so far below the middle of its row, and what bf16 keeps as a line."""
    for i, (kind, alpha) in enumerate(zip(kinds, (1.0, 0.45), strict=False)):
        at = [y + down + (0.18 - down / 2) * (2 * i - 1) * (len(kinds) > 1) for y in range(len(values))]
        widths = [own.get(kind, 0.0) for own in values]
        axes.barh(at, widths, height=0.3 - down, color=MUTED, alpha=alpha, label=BYTES[kind])
        for y, own in zip(at, values, strict=True):
            said = text.number(own[kind]) if kind in own else "not measured" if not (own or i) else ""
            axes.annotate(
                said, (own.get(kind, 0.0), y), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
    if base is not None:
        axes.axvline(base, color=INK, linewidth=0.9, linestyle="--", label="bf16 keeps")
    top = max((v for own in values for v in own.values()), default=1.0)
    axes.set_xlim(0, 1.25 * max(top, base or 0.0))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("bytes an element, lower is better")


def _panels(size: _Size, rows: int, count: int) -> Sheet:
    """Panels side by side, or one below the other on a narrow screen, with room for so many rows each."""
    down = count if size.stacked else 1
    height = down * (0.85 + size.row * max(rows, 2))
    drawn = sheet("", height, count // down, down, width=size.width, grid="x", sharey=not size.stacked)
    for axes in drawn.panels:
        axes.set_ylim(rows - 0.6, -0.75) if size.stacked else axes.set_ylim(rows - 0.4, -0.6)
    return drawn


def _label(axes: Axes, size: _Size, words: Sequence[tuple[str, str, list[str]]], beside: bool = True) -> None:
    """Names of the rows, with the verdict and what stands against it: beside the rows, or above each on a narrow screen."""
    across = axes.get_yaxis_transform()
    if size.stacked:
        axes.set_yticks([])
        about: Any = {"transform": across, "va": "center", "color": INK, "fontsize": 8.5}
        about["bbox"] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}  # lines end before the words
        for y, (name, verdict, more) in enumerate(words):
            room = max(len(verdict), 54 - len(name))
            said = _fitting(more, room - len(verdict) - 2)
            tail = f"{verdict}: {said}" if said else verdict
            axes.text(0.012, y - 0.4, text.short(name, 30), **about)
            if not tail:
                continue
            axes.text(1, y - 0.4, tail, ha="right", **about)
        return
    axes.set_yticks(range(len(words)), [text.short(name, 32) for name, _, _ in words])
    if not beside:
        axes.set_yticks(range(len(words)), [f"{text.short(n, 28)}\n{v}" for n, v, _ in words])
        return
    for y, (_, verdict, more) in enumerate(words):
        shift = 0.19 if more else 0.0
        axes.text(1.015, y - shift, verdict, transform=across, va="center", color=INK)
        if more:
            said = _fitting(more, 44)
            axes.text(1.015, y + 0.21, said, transform=across, va="center", color=MUTED, fontsize=7.5)


def _fitting(said: Sequence[str], most: int) -> str:
    """Reasons in so many characters: the first ones and how many more; the middle of one alone is left out."""
    for kept in range(len(said), 0, -1):
        more = f" and {len(said) - kept} more" if kept < len(said) else ""
        words = "; ".join(said[:kept]) + more
        if len(words) <= most:
            return words
    alone = f"{len(said)} doubts" if len(said) > 1 else "".join(said)
    return text.short(alone, most) if most >= 8 else ""
