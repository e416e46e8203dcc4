"""Charts of the suites: speedups, rates and numerical quality by shape, bandwidth of casts, where casts break."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge import gathered
from harness.report.drawing import (
    BAND,
    INK,
    LEAST_DB,
    MUTED,
    PLACES,
    Chart,
    bands,
    bytes_axis,
    evenly,
    forest,
    look,
    ratio_axis,
    ratio_limits,
    sheet,
    span,
    styled,
    ticks,
)
from harness.report.records import SQNR, isolated, numerics_by_arm
from harness.report.table import known
from harness.report.verdicts import fp8_pairs
from harness.store import text
from harness.store.case import Arm, arm_of, parse
from harness.store.compare import MODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.runs import Machine
    from harness.report.table import Record

LINES: tuple[Any, ...] = (":", "--", "-.", (0, (1, 3)))
MOST_ROWS = 28  # cases in one figure; the caption says how many of how many
MOST_MARKS = 60  # of an arm in a row
SIZES = ("randn", "outliers_1e2", "outliers_1e3", "outliers_1e4", "outliers_1e5")


def speedups(machine: Machine) -> list[Chart]:
    """Speedup of each FP8 arm by shape, with its interval and the case's A/A band; a figure a suite."""
    formed = (p for p in fp8_pairs(machine) if known(p["speedup"]))
    groups = gathered(((p["suite"], p["regime"]), p) for p in formed)
    first = {"linear": 0, "gemm": 1}
    ordered = sorted(groups.items(), key=lambda item: (first.get(item[0][0], 2), item[0]))
    return [_forest(machine, suite, regime, own) for (suite, regime), own in ordered]


@styled
def _forest(machine: Machine, suite: str, regime: str, every: Sequence[Record]) -> Chart:
    modes = gathered((arm_of(r).mode, r) for r in every)
    panels: dict[str, Sequence[Record]] = {f"{m} against {m}": modes[m] for m in MODES if m in modes} or {
        "against bf16": every
    }
    every = [r for own in panels.values() for r in own]
    cases = _largest(machine, every)
    arms = {r["arm"]: arm_of(r) for r in every}
    styles = {str(arm.modeless): look(machine, arm) for arm in arms.values()}
    height = 1.0 + len(cases) * max(0.26, 0.1 * len(styles))
    key = f"speedup-{suite}-{regime}-{machine.env_id}"
    drawn = sheet(key, height, len(panels), grid="x", rows=list(cases.values()), sharex=True, sharey=True)
    ends, row = [1.0], {case: i for i, case in enumerate(cases)}
    for axes, (title, group) in zip(drawn.panels, panels.items(), strict=True):
        axes.axvline(1, color=INK, linewidth=0.9)
        shown = [r for r in group if r["case_id"] in cases]
        bands(axes, {row[r["case_id"]]: r["floor"] for r in shown}.items(), 0.84)
        of_arm = gathered((str(arms[r["arm"]].modeless), r) for r in shown)
        for i, (arm, style) in enumerate(styles.items()):
            own = of_arm[arm]
            at = [row[r["case_id"]] + (i - (len(styles) - 1) / 2) * 0.62 / max(len(styles), 2) for r in own]
            points = ((y, r["speedup"], r["low"], r["high"]) for y, r in zip(at, own, strict=True))
            ends += forest(axes, points, style)
        ratio_axis(axes.xaxis, log=axes.set_xscale)
        axes.set(title=title, xlabel="speedup over bf16 (log scale)")
    drawn.axes.set_xlim(*ratio_limits(ends))
    for arm, style in styles.items():
        drawn.axes.plot([], [], **style, label=text.short(arm, 40))
    drawn.axes.fill_betweenx([], [], [], color=BAND, label="A/A noise floor")
    return drawn.say("speedup", suite=suite, regime=regime, **_count(cases, every))


@styled
def soundness(machine: Machine) -> list[Chart]:
    """SQNR of every checked result by arm, with the bound where the suite stores one."""
    worst = [w for w in numerics_by_arm(machine) if w.fp8 and any(map(math.isfinite, w.sqnr.values()))]
    if not worst:
        return []
    columns = ["metric", "suite", "arm", "value"]
    checked = machine.frame.loc[machine.rows.where(metric=SQNR, status="ok"), columns]
    rows = checked[np.isfinite(checked["value"])].itertuples(index=False)
    values = gathered((tuple(key), value) for *key, value in rows)
    labels = [f"{w.suite}: {w.arm}" for w in worst]
    drawn = sheet(f"sqnr-{machine.env_id}", 0.8 + 0.24 * len(labels), rows=labels)
    bounded = False
    # A recipe's colour and marker; which result it is shows by the height within the row, from top to bottom.
    shown = [m for m in SQNR if any(m == metric for metric, *_ in values)]
    for i, metric in enumerate(shown):
        shift = 0.56 * (i - (len(shown) - 1) / 2) / max(len(shown), 2)
        for y, w in enumerate(worst):
            own = sorted(values.get((metric, w.suite, w.arm), ()))
            own = [own[j] for j in evenly(len(own), MOST_MARKS)]
            style = look(machine, w.fields, markersize=3.2, markeredgewidth=0.8)
            drawn.axes.plot(own, [y + shift] * len(own), **style)
            if own and metric in w.bounds:
                ends = [y + shift - 0.16, y + shift + 0.16]
                drawn.axes.plot([w.bounds[metric]] * 2, ends, color=INK, linewidth=1.4)
                bounded = True
    if bounded:
        drawn.axes.plot([], [], color=INK, linewidth=1.4, label="least that the suite accepts")
    drawn.axes.set_xlabel("SQNR (dB), higher is better")
    drawn.axes.margins(x=0.06)
    span(drawn.axes, LEAST_DB)
    return [drawn.say("sqnr", results=[SQNR[m] for m in shown], bounded=bounded, most=MOST_MARKS)]


@styled
def rates(machine: Machine) -> list[Chart]:
    """TFLOP/s of every GEMM arm by shape, with the matmul rates that this device reached in the ceilings."""
    records = [r for r in isolated(machine, "gemm") if known(r["tflops"]) and r["regime"]]
    if not records:
        return []
    cases = _largest(machine, records)
    drawn = sheet(f"rates-{machine.env_id}", 0.8 + 0.24 * len(cases), rows=list(cases.values()))
    row = {case: i for i, case in enumerate(cases)}
    for arm, own in gathered((r["arm"], r) for r in records).items():
        points = [(r["tflops"], row[r["case_id"]]) for r in own if r["case_id"] in cases]
        drawn.axes.plot(*zip(*points, strict=True), **look(machine, arm_of(own[0])), label=arm)
    for i, (kind, rate) in enumerate(sorted(machine.achieved.items())):
        line: Any = {"color": MUTED, "linewidth": 0.9, "linestyle": LINES[i % 4]}
        drawn.axes.axvline(rate, **line, label=f"best {kind} product")
    drawn.axes.set_xlim(left=0)
    drawn.axes.set_xlabel("TFLOP/s (2MNK / median time)")
    return [drawn.say("rates", **_count(cases, records))]


@styled
def casts(machine: Machine) -> list[Chart]:
    """Bandwidth of each cast by bytes moved, under the copy that this device reached; a panel an arm."""
    arms = gathered((r["arm"], r) for r in isolated(machine, "cast") if known(r["gb_per_s"]))
    if not arms:
        return []
    copy = [(moved, rate / 1e9) for moved, rate in machine.copies]
    drawn = sheet(f"casts-{machine.env_id}", 3.1, len(arms), sharey=True, grid="y")
    for axes, (arm, own) in zip(drawn.panels, arms.items(), strict=True):
        series = gathered((_cast_label(machine, r), (r["bytes_moved"], r["gb_per_s"])) for r in own)
        for label, points in series.items():
            # The recipe whose scales a label names gives it its colour.
            recipe = next((word for word in label.replace(",", " ").split() if word in PLACES), "")
            fill = "none" if "e5m2" in label else "full"
            style = look(machine, Arm(recipe, variant=arm), fillstyle=fill, linestyle="-", linewidth=1.1)
            axes.plot(*zip(*sorted(points), strict=True), **style, markeredgewidth=0.9, label=label or arm)
        if copy:
            line: Any = {"color": MUTED, "linewidth": 1.1, "linestyle": "--", "label": "measured copy"}
            axes.plot(*zip(*copy, strict=True), **line)
        bytes_axis(axes)
        axes.set_ylim(bottom=0)
        ticks(axes.yaxis, 5)
        axes.set(title=arm, xlabel="bytes moved")
    drawn.axes.set_ylabel("GB/s")
    return [drawn.say("casts", copy=copy)]


def _cast_label(machine: Machine, record: Record) -> str:
    named = {k: v for k, v in text.axes_of(record["axes"]).items() if not isinstance(v, int)}
    return text.case_label(named, machine.constant_axes("cast"))


@styled
def outliers(machine: Machine) -> list[Chart]:
    """SQNR of what is no outlier by how large the outliers are; a panel for each GEMM of a layer."""
    found: dict[str, dict[str, dict[int, float]]] = {}  # role -> arm -> place of the size -> dB
    for r in machine.pick(suite="outliers", metric="bulk_sqnr_db", status="ok"):
        axes = text.axes_of(r["axes"])
        if axes.get("data") in SIZES and math.isfinite(r["value"]):
            series = found.setdefault(str(axes.get("role")), {}).setdefault(r["arm"], {})
            at = SIZES.index(str(axes["data"]))
            series[at] = min(r["value"], series.get(at, math.inf))
    if not found:
        return []
    drawn = sheet(f"outliers-{machine.env_id}", 3.3, len(found), sharey=True, grid="y")
    arms = dict.fromkeys(arm for by_arm in found.values() for arm in by_arm)
    line: Any = {"linestyle": "-", "linewidth": 1.1, "fillstyle": "none"}
    styles = {arm: look(machine, parse(arm), **line) for arm in arms}
    for panel, (role, by_arm) in zip(drawn.panels, found.items(), strict=True):
        for arm, values in by_arm.items():
            panel.plot(*zip(*sorted(values.items()), strict=True), **styles[arm])
        panel.set_xticks(range(len(SIZES)), ["none", "100x", "1e3x", "1e4x", "1e5x"])
        panel.set(title=role, xlabel="size of the outliers")
    drawn.axes.set_ylabel("SQNR of the rest (dB)")
    for arm, style in styles.items():
        drawn.axes.plot([], [], **style, label=arm)
    return [drawn.say("outliers")]


def _largest(machine: Machine, records: Sequence[Record]) -> dict[str, str]:
    """The cases to draw, id to label, in reading order; those with the largest M*K*N where there are too many."""
    rows = {r["case_id"]: r for r in records}
    sizes = {c: [v for v in text.axes_of(r["axes"]).values() if isinstance(v, int)] for c, r in rows.items()}
    kept = sorted(rows, key=lambda c: math.prod(sizes[c]), reverse=True)[:MOST_ROWS]
    return {c: text.short(machine.label(r), 48) for c, r in rows.items() if c in kept}


def _count(cases: Mapping[str, str], records: Sequence[Record]) -> dict[str, int]:
    return {"cases": len(cases), "of": len({r["case_id"] for r in records})}
