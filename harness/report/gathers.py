"""Gathers: what FSDP2 sends when weights are gathered in FP8, beside high precision and beside torchao."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from harness.judge import gathered
from harness.report.records import key_of
from harness.report.table import Cell, Record, Table, resolved_of, status_cell, table_of
from harness.report.words import say
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine
    from harness.report.table import Row


def gathers_table(machine: Machine) -> Table:
    """A row for each case and arm; an arm that could not run says why in the table of failed and skipped rows."""
    arms = gathered((key_of(r), r) for r in machine.pick(suite="allgather"))
    records = []
    for key, own in arms.items():
        axes: Any = text.axes_of(own[0]["axes"])
        record = {"ranks": axes["ranks"], "weights as": str(axes["param_dtype"]), "arm": own[0]["arm"]}
        if all(r["status"] == "ok" for r in own):
            base = arms.get((*key[:2], own[0]["baseline"] or key[2]))
            record |= _figures(own, _sum(base, "wire_bytes", "all_gather") if base else 0, machine)
        else:
            record["gathered"] = status_cell(own[0])
        records.append(record)
    every = (resolved_of(r).get("weights") for own in arms.values() for r in own)
    caption = say("caption_gathers", weights=next(filter(None, every), {})) if records else ""
    return table_of(machine, "gathers", records, caption, sortable=False)


def _figures(own: Sequence[Record], base: float, machine: Machine) -> Row:
    by_metric: Row = {r["metric"]: r for r in own if not r["part"]}
    size, apart = _sum(own, "wire_bytes", "all_gather"), by_metric.get("loss_deviation")
    figures = {
        "gathered": size,
        "of_baseline": size / base if base else None,
        "reduces": _sum(own, "collectives", "all_reduce"),
        "scattered": _sum(own, "wire_bytes", "reduce_scatter"),
        "loss": by_metric["loss"]["value"],
        "same": apart and (f"{text.number(apart['value'], 2)} apart" if apart["value"] else "yes"),
    }
    exposed = statistics.median(by_metric["exposed_ms"]["samples"])
    for name, ms in (("step", by_metric["step_ms"]["value"]), ("exposed", exposed)):
        figures[name] = Cell(text.number(ms), ms, note="" if machine.is_gpu else "of a CPU")
    return figures


def _sum(rows: Sequence[Record], metric: str, collective: str) -> float:
    return sum(r["value"] for r in rows if r["metric"] == metric and r["part"].startswith(collective))
