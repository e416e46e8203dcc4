"""Charts: speedups, rates and numerical quality by shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from harness.report.drawing import (
    BAND,
    INK,
    LEAST_DB,
    MUTED,
    Chart,
    evenly,
    ratio_axis,
    ratio_limits,
    sheet,
    span,
    styled,
)
from harness.report.looks import PLACES, look, looks
from harness.report.numerics import SQNR, numerics_by_arm
from harness.report.records import arm_records, newest
from harness.report.verdicts import fp8_pairs
from harness.store import text
from harness.store.arm import Arm, arm_of, arms_of
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from harness.report.runs import Machine

LINES: tuple[Any, ...] = (":", "--", "-.", (0, (1, 3)))
MOST_ROWS = 28  # cases in one figure; the caption says how many of how many
MOST_MARKS = 60  # of an arm in a row


def speedups(machine: Machine) -> list[Chart]:
    """Speedup of each FP8 arm by shape, with its interval and the case's A/A band; a figure a suite."""
    pairs = fp8_pairs(machine)
    pairs = pairs[pairs["speedup"].notna()]
    charts = []
    order = {"linear": 0, "gemm": 1}
    groups = sorted(
        pairs.groupby(["suite", "regime"]), key=lambda item: (order.get(str(item[0][0]), 2), item[0])
    )
    for (suite, regime), own in groups:
        modes = {mode: own[[arm.mode == mode for arm in arms_of(own)]] for mode in ("eager", "compile")}
        panels = {f"{m} against {m}": g for m, g in modes.items() if len(g)} or {"against bf16": own}
        charts.append(_forest(machine, str(suite), str(regime), panels))
    return charts


@styled
def rates(machine: Machine) -> list[Chart]:
    """TFLOP/s of every GEMM arm by shape, with the matmul rates that this device reached in the ceilings."""
    records = [
        r
        for r in newest(arm_records(machine, "gemm"))
        if r["tflops"] == r["tflops"] and r["regime"] == "isolated"
    ]
    if not records:
        return []
    cases = _largest(records, machine.constant_axes("gemm"))
    shown = [r for r in records if r["case_id"] in cases]
    drawn = sheet(f"rates-{machine.env_id}", 0.8 + 0.24 * len(cases), rows=list(cases.values()))
    axes = drawn.axes
    for arm, style in looks(machine, ((r["arm"], arm_of(r)) for r in records)).items():
        own = [(r["tflops"], list(cases).index(r["case_id"])) for r in shown if r["arm"] == arm]
        axes.plot(*zip(*own, strict=True), **style, label=arm)
    best = machine.ceilings.achieved if machine.ceilings else {}
    for i, (kind, rate) in enumerate(sorted(best.items())):
        axes.axvline(rate, color=MUTED, linewidth=0.9, linestyle=LINES[i % 4], label=f"best {kind} product")
    axes.set_xlim(left=0)
    axes.set_xlabel("TFLOP/s (2MNK / median time)")
    caption = f"{_count(cases, records)} Isolated regime. Lines: the best products measured on this device, ceilings included."
    return [drawn.chart("GEMM rate by shape", caption)]


@styled
def casts(machine: Machine) -> list[Chart]:
    """Bandwidth of each cast by bytes moved, under the copy that this device reached; a panel an arm."""
    records = [r for r in newest(arm_records(machine, "cast")) if r["gb_per_s"] == r["gb_per_s"]]
    records = [r for r in records if r["regime"] in ("isolated", "")]
    if not records:
        return []
    copy = [
        (moved, rate / 1e9)
        for moved, rate in (machine.ceilings.moves.get("copy", ()) if machine.ceilings else ())
    ]
    arms = list(dict.fromkeys(r["arm"] for r in records))
    constant = machine.constant_axes("cast")
    drawn = sheet(f"casts-{machine.env_id}", 3.1, len(arms), sharey=True, grid="y")
    for axes, arm in zip(drawn.panels, arms, strict=True):
        series: dict[str, list[tuple[float, float]]] = {}
        for r in records:
            if r["arm"] == arm:
                named = {k: v for k, v in text.axes_of(r["axes"]).items() if not isinstance(v, int)}
                series.setdefault(text.case_label(named, constant), []).append(
                    (r["bytes_moved"], r["gb_per_s"])
                )
        for label, points in series.items():
            xs, ys = zip(*sorted(points), strict=True)
            fill = "none" if "e5m2" in label else "full"
            style = look(machine, Arm(_scaling(label), variant=arm)) | {"fillstyle": fill, "linestyle": "-"}
            style |= {"linewidth": 1.1, "markeredgewidth": 0.9}
            axes.plot(xs, ys, **style, label=label or arm)
        if copy:
            axes.plot(
                *zip(*copy, strict=True), color=MUTED, linewidth=1.1, linestyle="--", label="measured copy"
            )
        axes.set_title(arm)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: text.bytes_(v)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("bytes moved")
    drawn.axes.set_ylabel("GB/s")
    note = (
        "" if copy else " The copy bandwidth of this machine was not measured in these runs (suite ceilings)."
    )
    caption = f"Logical bytes (read and written) over the median time, 1e9 bytes a second.{note}"
    return [drawn.chart("Cast bandwidth by size", caption)]


@styled
def soundness(machine: Machine) -> list[Chart]:
    """SQNR of every checked result by arm, with the bound where the suite stores one."""
    frame = machine.frame
    rows = frame[frame["metric"].isin(SQNR) & (frame["status"] == "ok") & frame["value"].map(math.isfinite)]
    worst = [w for w in numerics_by_arm(machine) if w.fp8 and any(map(math.isfinite, w.sqnr.values()))]
    if not worst:
        return []
    labels = [f"{w.suite}: {w.arm}" for w in worst]
    drawing = sheet(f"sqnr-{machine.env_id}", 0.8 + 0.24 * len(labels), rows=labels)
    axes = drawing.axes
    bounded = False
    # A recipe's colour and marker; which result it is shows by the height within the row, from top to bottom.
    shown = [m for m in SQNR if (rows["metric"] == m).any()]
    for i, metric in enumerate(shown):
        drawn = rows[rows["metric"] == metric]
        shift = 0.56 * (i - (len(shown) - 1) / 2) / max(len(shown), 2)
        for y, w in enumerate(worst):
            own = sorted(drawn["value"][(drawn["suite"] == w.suite) & (drawn["arm"] == w.arm)])
            own = [own[j] for j in evenly(len(own), MOST_MARKS)]
            style = look(machine, w.fields) | {"markersize": 3.2, "markeredgewidth": 0.8}
            axes.plot(own, [y + shift] * len(own), **style)
            if len(own) and metric in w.bounds:
                ends = [y + shift - 0.16, y + shift + 0.16]
                axes.plot([w.bounds[metric]] * 2, ends, color=INK, linewidth=1.4)
                bounded = True
    if bounded:
        axes.plot([], [], color=INK, linewidth=1.4, label="least that the suite accepts")
    axes.set_xlabel("SQNR (dB), higher is better")
    axes.margins(x=0.06)
    span(axes, LEAST_DB)
    names = ", ".join(SQNR[m] for m in shown)
    order = f" Within a row from top to bottom: {names}." if len(shown) > 1 else ""
    bound = " A bar: the bound of the case nearest to it." if bounded else ""
    caption = (
        f"A mark a case ({MOST_MARKS} of an arm at most, by rank), against a high-precision reference of the same operands."
        f"{order}{bound}"
    )
    return [drawing.chart("Numerical quality by arm", caption)]


def _scaling(label: str) -> str:
    """The recipe whose scales a cast's label names, "" where it names none: its colour is that recipe's."""
    return next((word for word in label.replace(",", " ").split() if word in PLACES), "")


@styled
def _forest(machine: Machine, suite: str, regime: str, panels: Mapping[str, Any]) -> Chart:
    everything = [r for g in panels.values() for r in rows_of(g)]
    cases = _largest(everything, machine.constant_axes(suite))
    styles = looks(machine, ((str(arm_of(r).modeless), arm_of(r)) for r in everything))
    arms = list(styles)
    height = 1.0 + len(cases) * max(0.26, 0.1 * len(arms))
    names = list(cases.values())
    key = f"speedup-{suite}-{regime}-{machine.env_id}"
    drawn = sheet(key, height, len(panels), grid="x", rows=names, sharex=True, sharey=True)
    ends, row = [1.0], {case: i for i, case in enumerate(cases)}
    for axes, (title, group) in zip(drawn.panels, panels.items(), strict=True):
        axes.axvline(1, color=INK, linewidth=0.9)
        shown = [r for r in rows_of(group) if r["case_id"] in cases]
        floors = {row[r["case_id"]]: r["floor"] for r in shown if r["floor"] == r["floor"]}
        lows = [1 / floor for floor in floors.values()]
        widths = [floor - 1 / floor for floor in floors.values()]
        axes.barh(list(floors), widths, left=lows, height=0.84, color=BAND, linewidth=0)
        for i, arm in enumerate(arms):
            own = [r for r in shown if str(arm_of(r).modeless) == arm]
            at = [row[r["case_id"]] + (i - (len(arms) - 1) / 2) * 0.62 / max(len(arms), 2) for r in own]
            known = [(y, r["low"], r["high"]) for y, r in zip(at, own, strict=True) if r["low"] == r["low"]]
            if known:
                axes.hlines(*zip(*known, strict=True), color=styles[arm]["color"], linewidth=1.3)
            axes.plot([r["speedup"] for r in own], at, **styles[arm])
            ends += [end for r in own for end in (r["low"], r["high"], r["speedup"]) if end == end]
        axes.set_title(title)
        ratio_axis(axes.xaxis, log=axes.set_xscale)
        axes.set_xlabel("speedup over bf16 (log scale)")
    drawn.axes.set_xlim(*ratio_limits(ends))
    for arm, style in styles.items():
        drawn.axes.plot([], [], **style, label=text.short(arm, 40))
    drawn.axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
    caption = f"{_count(cases, everything)} Right of 1 FP8 is faster. Lines: 95 % intervals over rounds; {regime} regime."
    load = " under sustained load" if regime == "sustained" else ""
    return drawn.chart(f"Speedup by shape: {suite}{load}", caption)


def _largest(records: Sequence[Mapping[str, Any]], constant: Collection[str]) -> dict[str, str]:
    """The cases to draw, id to label, in reading order; those with the largest M*K*N where there are too many."""
    axes = {r["case_id"]: text.axes_of(r["axes"]) for r in records}
    size = {c: math.prod(v for v in a.values() if isinstance(v, int)) for c, a in axes.items()}
    kept = set(sorted(axes, key=lambda c: size[c], reverse=True)[:MOST_ROWS])
    return {c: text.short(text.case_label(a, constant), 48) for c, a in axes.items() if c in kept}


def _count(cases: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> str:
    total = len({r["case_id"] for r in records})
    return f"The {len(cases)} largest of {total} cases; the table has all." if len(cases) < total else ""
