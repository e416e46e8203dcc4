"""Utilization: the MFU of training steps with every denominator named.

The columns are those of `harness.machine.mfu.COLUMNS` and always stand together: no single one of them can be read alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.machine import mfu
from harness.report.records import arm_records
from harness.report.table import CASE_ID, Cell, Column, Table, axis_column, known, make_table
from harness.report.tables import ARM, run_column
from harness.store import text

if TYPE_CHECKING:
    from harness.report.runs import Machine, Material
    from harness.report.table import Record

SUITE = "train"
NO_GPU = (
    "No training step has been measured on a GPU in these runs: no MFU, no tokens/s and no time of a GPU on this page was "
    "measured by this project. A CPU has no entry in the table of peaks and none is substituted: what was measured here shows "
    "numerics and mechanisms."
)


def mfu_table(machine: Machine) -> Table:
    """One row a (case, arm, rule of counting) of the suite train; columns without a value say N/A."""
    records: list[Record] = []
    for r in arm_records(machine, SUITE):
        records += [{**r, "used": u} for u in mfu.of_row(r, machine.device, machine.achieved)]
    axes = [text.axes_of(r["axes"]) for r in records]
    names = [n for n in sorted({n for a in axes for n in a}) if len({str(a.get(n)) for a in axes}) > 1]
    columns = [
        *run_column(arm_records(machine, SUITE)),
        *map(axis_column, names),
        ARM,
        *(Column(c.title, _maker(c), c.meaning, numeric=c.name != "formula") for c in mfu.COLUMNS),
        CASE_ID,
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
        columns,
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
        "this project."
    )


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
