"""Steps: what a training step of the suite `train` costs by arm, what share of the peaks it reaches, and where its time goes.

The columns of MFU are those of `harness.machine.mfu.COLUMNS` and always stand together: no single one of them can be read
alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from harness.advise.advised_arms import FLOOR, advised_arms, verdict
from harness.machine import mfu
from harness.machine.kernels_by_name import CLASSES
from harness.report.records import arm_records, first_steps, key_of
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
    number,
    resolved_of,
    table_of,
    word,
)
from harness.report.tables import run_column
from harness.store import text
from harness.store.case import arm_of
from harness.store.compare import NO_FP8
from harness.store.printer import Cell, Table
from harness.store.rows import grouped

if TYPE_CHECKING:
    from harness.report.runs import Machine, Material
    from harness.report.table import Row

SUITE = "train"
TRACES = "Traces, gzipped, in the folder of their run on the machine that measured; Perfetto opens them."


def advised_table(machine: Machine) -> Table:
    """Arms that converted what was advised, against the bar that no model may lose by the advice."""
    arms, constant = advised_arms(machine.frame, machine.every_pair), machine.constant_axes(SUITE)
    records = []
    for a in arms:
        is_control, style = a.layers and math.isnan(a.predicted), STYLES.get(a.outcome, "")
        gain = estimate(a.speedup, a.low, a.high, style) if a.converted else Cell(NO_FP8, None, "muted")
        records.append({
            "case": Cell(text.case_label(a.axes, constant), a.model),
            "arm": a.arm,
            "baseline": a.baseline,
            "speedup": gain,
            "predicted": Cell("its control" if is_control else text.ratio(a.predicted), a.predicted),
            "outcome": word(a.outcome, text.reason(a.reason)),
            "layers": Cell(f"{a.converted} of {a.layers}" if a.layers else text.NONE, a.converted),
        })  # fmt: skip
    hint = "holds or below: the whole interval is on that side of the bar"
    every = [*columns("advised"), Column(f"not below {FLOOR:g}", "outcome", hint)]
    caption = f"{verdict(arms)}." if arms else ""
    return make_table(f"advised-{machine.env_id}", every, records, caption, sortable=False)


def first_steps_table(machine: Machine) -> Table:
    """An arm a row: how far its first steps lay from the control's at worst, how its precision was proved, and every warning."""
    records = []
    for arm, own in grouped((s.arm, s) for s in first_steps(machine)).items():
        far = max(own, key=lambda s: abs(math.log(s.norm_ratio)) if s.norm_ratio > 0 else math.inf)
        remarks = {"proof": (s.proof for s in own), "warnings": (w for s in own for w in s.warnings)}
        record: Row = {
            "arm": arm,
            "gap": max((s.loss_gap for s in own), key=lambda gap: (math.isnan(gap), gap)),
            "norms": far.norm_ratio,
        }
        records.append(record | {name: "; ".join(dict.fromkeys(words)) for name, words in remarks.items()})
    return table_of(machine, "first_steps", records, "First steps, before any was timed.", sortable=False)


def traces_table(machine: Machine) -> Table:
    """The traces that were asked for: which steps of which arm, and the file in the run's folder."""
    traced = (r for r in machine.pick(suite=SUITE) if resolved_of(r).get("trace") and not arm_of(r).control)
    found = {key: own[0] for key, own in grouped((key_of(r), r) for r in traced).items()}
    runs, cases = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    records = []
    for row in found.values():
        about = resolved_of(row)
        more = {"run": row["run_id"] * (len(runs) > 1), "case": machine.label(row) * (len(cases) > 1)}
        steps = " to ".join(map(str, about.get("trace_steps", ())))
        records.append({**row, **more, "steps": steps, "trace": str(about["trace"])})
    return table_of(machine, "traces", records, TRACES, sortable=False)


# Utilization


def mfu_table(machine: Machine) -> Table:
    """One row a (case, arm, rule of counting) of the suite train; columns without a value say N/A."""
    rows = arm_records(machine, SUITE)
    records = [r | {"used": u} for r in rows for u in mfu.of_row(r, machine.device, machine.achieved or None)]
    figures = [
        Column(c.title, partial(_figure, c), c.meaning, numeric=c.name != "formula") for c in mfu.COLUMNS
    ]
    first = [*run_column(rows), *axis_columns(records), Column("arm", arm_cell), *figures]
    rules = dict.fromkeys(r["used"].formula for r in records)
    caption = [f"FLOPs by rule: {'; '.join(f'{name}: {mfu.FORMULAS[name]}' for name in rules)}."] * bool(
        rules
    )
    if machine.is_gpu and not machine.device:
        caption.append("This GPU is not in the table of peaks: N/A, no fallback.")
    flags = dict.fromkeys(flag for r in records for flag in r["used"].flags)
    caption += [f"{flag.replace('_', ' ').capitalize()}: {mfu.FLAGS[flag]}." for flag in flags]
    return table_of(machine, "mfu", records, " ".join(caption), first=first)


def _figure(column: mfu.MfuColumn, record: Record) -> Cell:
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
    if named := ", ".join(dict.fromkeys(m.name for m in gpus)):
        return f"No training step has been measured on {named} in these runs (sweep=train): no MFU on this page was measured by this project."
    return (
        "No training step has been measured on a GPU in these runs: no MFU, no tokens/s and no time of a GPU on this page was measured "
        "by this project. A CPU has no entry in the table of peaks and none is substituted: what was measured here shows numerics and "
        "mechanisms."
    )


def definitions() -> list[tuple[str, str]]:
    """What each column of MFU means, then how FLOPs are counted."""
    meanings = [(c.title, c.meaning) for c in mfu.COLUMNS if c.name != "formula"]
    return meanings + [(f"FLOPs, {name}", meaning) for name, meaning in mfu.FORMULAS.items()]


# Where the time goes


def breakdown(machine: Machine) -> Table:
    """Time of one profiled step by class of kernels, a row a (case, arm)."""
    timed = machine.pick(suite=SUITE, metric="kernel_time_ms", status="ok")
    steps = grouped((key_of(r), r) for r in timed if r["part"] and math.isfinite(r["value"]))
    records = [
        own[0] | {r["part"]: r["value"] for r in own} | {"ms": sum(r["value"] for r in own)}
        for own in steps.values()
    ]
    seen = {r["part"] for own in steps.values() for r in own}
    classes = [name for name in (*CLASSES, *sorted(seen - CLASSES.keys())) if name in seen]
    first = [
        *axis_columns(records),
        Column("arm", arm_cell),
        number("kernels (ms)", "ms"),
        *map(number, classes),
    ]
    method = (
        "by their names; kernels that overlap count twice"
        if machine.is_gpu
        else "of a CPU's operators, by their names"
    )
    caption = f"Where a step's time goes: milliseconds by class, {method}. A profiled step takes longer than a timed one."
    return make_table(f"breakdown-{machine.env_id}", first, records, caption)
