"""Utilization: the MFU of training steps with every denominator named, and published figures read again.

The columns are those of `harness.machine.mfu.COLUMNS` and always stand together: no single one of them can be read alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.machine import mfu
from harness.report.mfu_examples import EXAMPLES, NOT_FORMED, read_again
from harness.report.records import arm_records
from harness.report.table import CASE_ID, Cell, Column, Table, axis_column, known, make_table, number
from harness.report.tables import ARM, run_column
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
        "this project. What others published comes first, its MFU recomputed."
    )


def examples_table() -> Table:
    """Published figures that mislead, formed again from their inputs, with the columns that set them right."""
    columns = (
        number("printed", lambda f: Cell(f.example.key, f.example.printed, "bad" if f.impossible else "")),
        number("formed again", _formed),
        Column("taken for", lambda f: f.example.reads_as),
        number("mixed MFU", lambda f: _share(f.columns.mfu_mixed)),
        number("MFU of bf16 peak", lambda f: _share(f.columns.mfu_bf16_peak)),
        Column("what is wrong", lambda f: Cell(f.example.reason, note=_IMPOSSIBLE if f.impossible else "")),
        Column(
            "source",
            lambda f: Cell(f.example.source, note=f"{f.example.device}, read {f.example.date}"),
        ),
    )
    return make_table("mfu-examples", columns, [*map(read_again, EXAMPLES)], sortable=False)


_IMPOSSIBLE = "impossible: over 100 % of its own peak"


def _formed(found: Any) -> Cell:
    if found.reproduced is None:
        return Cell(NOT_FORMED, None, "muted")
    return Cell(f"{text.number(found.reproduced)} %", found.reproduced)


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
