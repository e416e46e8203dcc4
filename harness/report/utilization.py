"""Utilization: the MFU of training steps with every denominator named, and published figures read again.

The columns are those of `harness.machine.mfu.COLUMNS` and always stand together: no single one of them can be read alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.machine import mfu
from harness.report.mfu_examples import EXAMPLES, NOT_FORMED, read_again
from harness.report.records import arm_records
from harness.report.table import Cell, Column, Spec, Table, axis_spec, known, make_table
from harness.report.tables import arm_cell, run_column
from harness.store import text

if TYPE_CHECKING:
    from harness.report.runs import Machine, Material
    from harness.report.table import Record

SUITE = "train"
NONE_OURS = "MFU of others' published runs: none was measured by this project"
NO_GPU = (
    "No training step has been measured on a GPU in these runs: no MFU, no tokens/s and no time of a GPU on this page was "
    "measured by this project. What others published comes first, its MFU recomputed. A CPU has no entry in the table of "
    "peaks and none is substituted: what was measured here follows after it and shows numerics and mechanisms."
)


def mfu_table(machine: Machine) -> Table:
    """One row a (case, arm, rule of counting) of the suite train; columns without a value say N/A."""
    records: list[Record] = []
    for r in arm_records(machine, SUITE):
        records += [{**r, "used": u} for u in mfu.of_row(r, machine.device, machine.achieved)]
    axes = [text.axes_of(r["axes"]) for r in records]
    names = [n for n in sorted({n for a in axes for n in a}) if len({str(a.get(n)) for a in axes}) > 1]
    specs = [
        *run_column(arm_records(machine, SUITE)),
        *(axis_spec(name) for name in names),
        Spec("arm", arm_cell, numeric=False),
        *(Spec(c.title, _maker(c), c.meaning, numeric=c.name != "formula") for c in mfu.COLUMNS),
        Spec("case", lambda r: Cell(r["case_id"], r["case_id"], "id"), numeric=False),
    ]
    sentence = "; ".join(
        f"{name}: {mfu.FORMULAS[name]}" for name in dict.fromkeys(r["used"].formula for r in records)
    )
    unknown = (
        ""
        if machine.device or not machine.is_gpu
        else " This GPU is not in the table of peaks: N/A, no fallback."
    )
    flags = dict.fromkeys(f for r in records for f in r["used"].flags)
    notes = "".join(f" {flag.replace('_', ' ').capitalize()}: {mfu.FLAGS[flag]}." for flag in flags)
    return make_table(
        f"mfu-{machine.env_id}",
        specs,
        records,
        f"FLOPs by rule: {sentence}.{unknown}{notes}" if records else "",
    )


def why_none(material: Material) -> str:
    """What a page about MFU must say where it has no figure to show; "" where it has one."""
    gpus = [m for m in material.machines if m.is_gpu]
    if not gpus:
        return NO_GPU
    if any(mfu_table(m).rows for m in gpus):
        return ""
    named = ", ".join(dict.fromkeys(m.name for m in gpus))
    return (
        f"No training step has been measured on {named} in these runs (sweep=train): no MFU on this page was measured by "
        "this project. What others published comes first, its MFU recomputed."
    )


def examples_table() -> Table:
    """Published figures that mislead, formed again from their inputs, with the columns that set them right."""
    titles = (
        "printed",
        "formed again",
        "taken for",
        "mixed MFU",
        "MFU of bf16 peak",
        "what is wrong",
        "source",
    )
    numeric = ("printed", "formed again", "mixed MFU", "MFU of bf16 peak")
    rows = []
    for found in map(read_again, EXAMPLES):
        example = found.example
        rows.append(
            (
                Cell(example.key, example.printed, "bad" if found.impossible else ""),
                Cell(NOT_FORMED, None, "muted")
                if found.reproduced is None
                else Cell(f"{text.number(found.reproduced)} %", found.reproduced),
                Cell(example.reads_as),
                _share(found.columns.mfu_mixed),
                _share(found.columns.mfu_bf16_peak),
                Cell(
                    example.reason, note="impossible: over 100 % of its own peak" if found.impossible else ""
                ),
                Cell(example.source, note=f"{example.device}, read {example.date}"),
            )
        )
    columns = tuple(Column(t, t in numeric) for t in titles)
    return Table("mfu-examples", columns, tuple(rows), sortable=False)


def definitions() -> list[tuple[str, str]]:
    """What each column means, then how FLOPs are counted."""
    meanings = [(c.title, c.meaning) for c in mfu.COLUMNS if c.name != "formula"]
    return meanings + [(f"FLOPs, {name}", meaning) for name, meaning in mfu.FORMULAS.items()]


def _maker(column: mfu.Column) -> Any:
    def make(record: Record) -> Cell:
        value = getattr(record["used"], column.name)
        if isinstance(value, str):
            return Cell(value, value)
        if column.unit != "share":
            return Cell(text.number(value), value) if known(value) else Cell(text.NONE, None, "muted")
        flags = record["used"].flags
        if column.name == ("mfu_mixed" if known(record["used"].mfu_mixed) else "hfu"):
            bad = [f for f in flags if f != "bf16_peak_passed"]
            return _share(
                value, "bad" if "over_peak" in bad else "", ", ".join(f.replace("_", " ") for f in bad)
            )
        passed = column.name == "mfu_bf16_peak" and "bf16_peak_passed" in flags
        return _share(value, "", "bf16 peak passed" if passed else "")

    return make


def _share(value: float | None, style: str = "", note: str = "") -> Cell:
    if value is None or math.isnan(value):
        return Cell(text.NONE, None, "muted")
    return Cell(text.percent(value, 3), value, style, note)
