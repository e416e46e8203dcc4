"""Steps: what a training step of the suite `train` costs by arm, what share of the peaks it reaches, and where its time goes.

The columns of MFU are those of `harness.machine.mfu.COLUMNS` and always stand together: no single one of them can be read
alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.advise.advised_arms import FLOOR, advised_arms, verdict
from harness.judge import gathered
from harness.judge.model_title import title_of
from harness.machine import mfu
from harness.machine.kernels_by_name import CLASSES
from harness.report.drawing import HATCHES, INK, SERIES, Chart, sheet, styled
from harness.report.records import arm_records, compilations, first_steps, key_of, tokens_per_s
from harness.report.table import (
    NA,
    STYLES,
    Column,
    Record,
    arm_cell,
    axis_columns,
    columns,
    estimate,
    known,
    make_table,
    resolved_of,
    table_of,
    word,
)
from harness.report.tables import run_column
from harness.report.words import say
from harness.store import text
from harness.store.case import arm_of
from harness.store.compare import NO_FP8
from harness.store.printer import Cell, Table

if TYPE_CHECKING:
    from harness.report.runs import Machine, Material
    from harness.report.table import Row

SUITE = "train"
MOST_CASES = 6


def steps_tables(machine: Machine) -> list[Table]:
    """One row a (case, arm): speed with its paired ratio, then memory, energy and what compiling costs."""
    compiling = compilations(machine)
    records = [compiling.get(key_of(r), {}) | r for r in arm_records(machine, SUITE)]
    for r in records:
        expected = resolved_of(r).get("prediction")
        r["tokens_per_s"] = tokens_per_s(r)
        speedup = expected.get("speedup") if isinstance(expected, dict) else None
        r["predicted_speedup"] = speedup[0] if speedup else None
        r["predicted"] = estimate(*speedup) if speedup else Cell(text.NONE)
    constant, axes = machine.constant_axes(SUITE), text.axes_of(records[0]["axes"]) if records else {}
    # Of a single case no axis varies: all of them are said.
    fixed = text.axes_said(axes, sorted(constant) or sorted(axes))
    titles = list(dict.fromkeys(title_of(r) for r in records if r["status"] in ("ok", "partial")))
    lead = [*run_column(records), *axis_columns(records)]
    said = say("caption_steps", fixed=fixed, titles=titles, most=MOST_CASES)
    speed = table_of(machine, "train_speed", records, said, lead=lead, key="train-speed")
    said = "Other costs of the same steps."
    cost = table_of(machine, "train_cost", records, said, lead=lead, key="train-cost")
    return [speed, cost] if len(cost.columns) > len(lead) + 1 else [speed]


def advised_table(machine: Machine) -> Table:
    """Arms that converted what was advised, against the bar that no model may lose by the advice."""
    arms, constant = advised_arms(machine.frame, machine.every_pair), machine.constant_axes(SUITE)
    records = []
    for a in arms:
        is_control, style = a.layers and math.isnan(a.predicted), STYLES.get(a.outcome, "")
        gain = estimate(a.speedup, a.low, a.high, style) if a.converted else Cell(NO_FP8, None, "muted")
        predicted = Cell("its control" if is_control else text.ratio(a.predicted), a.predicted)
        record = {
            "case": Cell(text.case_label(a.axes, constant), a.model),
            "arm": a.arm,
            "baseline": a.baseline,
        }
        record |= {"speedup": gain, "predicted": predicted, "outcome": word(a.outcome, text.reason(a.reason))}
        record["layers"] = Cell(f"{a.converted} of {a.layers}" if a.layers else text.NONE, a.converted)
        records.append(record)
    hint = "holds or below: the whole interval is on that side of the bar"
    every = [*columns("advised"), Column(f"not below {FLOOR:g}", "outcome", hint)]
    said = f"{verdict(arms)}." if arms else ""
    return make_table(f"advised-{machine.env_id}", every, records, said, sortable=False)


def first_steps_table(machine: Machine) -> Table:
    """An arm a row: how far its first steps lay from the control's at worst, how its precision was proved, and every warning."""
    records = []
    for arm, own in gathered((s.arm, s) for s in first_steps(machine)).items():
        far = max(own, key=lambda s: abs(math.log(s.norm_ratio)) if s.norm_ratio > 0 else 0.0)
        said = {"proof": (s.proof for s in own), "warnings": (w for s in own for w in s.warnings)}
        record: Row = {"arm": arm, "gap": max(s.loss_gap for s in own), "norms": far.norm_ratio}
        records.append(record | {name: "; ".join(dict.fromkeys(words)) for name, words in said.items()})
    return table_of(machine, "first_steps", records, "First steps, before any was timed.", sortable=False)


def traces_table(machine: Machine) -> Table:
    """The traces that were asked for: which steps of which arm, and the file in the run's folder."""
    traced = (r for r in machine.pick(suite=SUITE) if resolved_of(r).get("trace") and not arm_of(r).control)
    found = {key: own[0] for key, own in gathered((key_of(r), r) for r in traced).items()}
    runs, cases = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    records = []
    for row in found.values():
        about = resolved_of(row)
        more = {"run": row["run_id"] * (len(runs) > 1), "case": machine.label(row) * (len(cases) > 1)}
        steps = " to ".join(map(str, about.get("trace_steps", ())))
        records.append({**row, **more, "steps": steps, "trace": str(about["trace"])})
    return table_of(machine, "traces", records, say("caption_traces", runs=runs), sortable=False)


# Utilization


def mfu_table(machine: Machine) -> Table:
    """One row a (case, arm, rule of counting) of the suite train; columns without a value say N/A."""
    rows = arm_records(machine, SUITE)
    records = [r | {"used": u} for r in rows for u in mfu.of_row(r, machine.device, machine.achieved or None)]
    figures = [
        Column(c.title, partial(_figure, c), c.meaning, numeric=c.name != "formula") for c in mfu.COLUMNS
    ]
    lead = [*run_column(rows), *axis_columns(records), Column("arm", arm_cell), *figures]
    facts = {name: list(dict.fromkeys(own)) for name, own in (
        ("formulas", (r["used"].formula for r in records)), ("flags", (f for r in records for f in r["used"].flags)))}  # fmt: skip
    said = say("caption_mfu", machine=machine, mfu=mfu, **facts) if records else ""
    return table_of(machine, "mfu", records, said, lead=lead)


def _figure(column: mfu.Column, record: Record) -> Cell:
    used, value = record["used"], getattr(record["used"], column.name)
    if isinstance(value, str):
        return Cell(value, value)
    if not known(value):
        return NA
    if column.unit != "share":
        return Cell(text.number(value), value)
    notes = used.doubts
    if column.name != ("mfu_mixed" if known(used.mfu_mixed) else "hfu"):
        notes = ["bf16_peak_passed"] * (column.name == "mfu_bf16_peak" and "bf16_peak_passed" in used.flags)
    words = ", ".join(notes).replace("_", " ")
    return Cell(text.percent(value, 3), value, "bad" if "over_peak" in notes else "", words)


def why_none(material: Material) -> str:
    """What a page about MFU must say where it has no figure to show; "" where it has one."""
    gpus = [m for m in material.machines if m.is_gpu]
    if any(mfu_table(m).rows for m in gpus):
        return ""
    return say("no_mfu", named=list(dict.fromkeys(m.name for m in gpus)))


def definitions() -> list[tuple[str, str]]:
    """What each column of MFU means, then how FLOPs are counted."""
    meanings = [(c.title, c.meaning) for c in mfu.COLUMNS if c.name != "formula"]
    return meanings + [(f"FLOPs, {name}", meaning) for name, meaning in mfu.FORMULAS.items()]


# Where the time goes


@styled
def breakdown(machine: Machine) -> list[Chart]:
    """Time of a step by class of kernels, one bar an arm; classes differ in hatch as well as colour."""
    timed = machine.pick(suite=SUITE, metric="kernel_time_ms", status="ok")
    rows = [r for r in timed if r["part"] and math.isfinite(r["value"])]
    cases = list(gathered((key_of(r)[:2], r) for r in rows).values())
    if not cases:
        return []
    shown = [(own, list(dict.fromkeys(r["arm"] for r in own))) for own in cases[:MOST_CASES]]
    seen = {r["part"] for own, _ in shown for r in own}
    order = [name for name in (*CLASSES, *sorted(seen - CLASSES.keys())) if name in seen]
    styles: list[Any] = [
        {"color": SERIES[i % 8], "hatch": HATCHES[i % 8], "edgecolor": INK, "linewidth": 0.4}
        for i in range(len(order))
    ]
    # A scale for each case: a small model's bars would vanish beside a large one's.
    ratios = [1.2 + len(arms) for _, arms in shown]
    height = 0.5 + sum(0.75 + 0.31 * len(arms) for _, arms in shown)
    drawn = sheet(f"breakdown-{machine.env_id}", height, 1, len(shown), grid="x", height_ratios=ratios)
    for axes, (own, arms) in zip(drawn.panels, shown, strict=True):
        times = {(r["part"], r["arm"]): r["value"] for r in own}
        left = np.zeros(len(arms))
        for name, style in zip(order, styles, strict=True):
            widths = [times.get((name, arm), 0.0) for arm in arms]
            axes.barh(range(len(arms)), widths, left=left, height=0.62, **style)
            left += widths
        for y, total in enumerate(left):
            axes.annotate(
                f"{text.number(total)} ms", (total, y), (5, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(arms)), arms)
        title = machine.label(own[0]) if len(shown) > 1 else ""
        axes.set(ylim=(len(arms) - 0.4, -0.6), xlim=(0, 1.14 * max(left) or 1.0), title=title)
    for name, style in zip(order, styles, strict=True):
        drawn.axes.barh([0], [0], label=name, **style)
    drawn.panels[-1].set_xlabel("time of one profiled step (ms)")
    return [drawn.say("breakdown", machine=machine, cases=len(cases), most=MOST_CASES)]
