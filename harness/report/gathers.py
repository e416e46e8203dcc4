"""Gathers: what FSDP2 sends when weights are gathered in FP8, beside high precision and beside torchao."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from harness.report.table import (
    Cell,
    Column,
    Record,
    Table,
    make_table,
    number,
    number4,
    resolved_of,
    status_cell,
)
from harness.store import text
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from harness.report.runs import Machine

SUITE = "allgather"
INTRO = (
    "Bytes and calls of one rank and step, counted at the collective. Exposed is what a step takes longer than one with "
    "nothing on the wire, in the same rounds. Same loss: as with the same layers and weights gathered in high precision, "
    "which are trained beside them."
)


def gathers_table(machine: Machine) -> Table:
    """A row for each case and arm; an arm that could not run says why in the table of failed and skipped rows."""
    frame = machine.frame
    arms: dict[tuple[str, str, str], list[Record]] = {}
    for r in rows_of(frame[frame["suite"] == SUITE]):
        arms.setdefault((r["run_id"], r["case_id"], r["arm"]), []).append(r)
    records = []
    for key, own in arms.items():
        axes: Any = text.axes_of(own[0]["axes"])
        record = {"ranks": axes["ranks"], "weights as": str(axes["param_dtype"]), "arm": own[0]["arm"]}
        bad = next((r for r in own if r["status"] != "ok"), None)
        if bad is None:
            base = arms.get((*key[:2], own[0]["baseline"] or key[2]))
            record |= _figures(own, _bytes(base, "all_gather") if base else None, machine)
        else:
            record["all-gather (bytes)"] = status_cell(own[0])
        records.append(record)
    columns = [
        number("ranks", "ranks", str),
        Column("weights as", "weights as"),
        Column("arm", "arm"),
        number("all-gather (bytes)", "all-gather (bytes)", text.count),
        number("of the baseline's", "of the baseline's", number4),
        number("all-reduces", "all-reduces", text.count),
        number("reduce-scatter (bytes)", "reduce-scatter (bytes)", text.count),
        number("last loss", "last loss", lambda loss: text.number(loss, 7)),
        Column("same loss", "same loss"),
        number("step (ms)", "step (ms)"),
        number("exposed (ms)", "exposed (ms)"),
    ]
    caption = _beside(arms) if records else ""
    return make_table(f"gathers-{machine.env_id}", columns, records, caption, sortable=False)


def _figures(own: list[Record], base: float | None, machine: Machine) -> dict[str, Any]:
    by_metric: dict[tuple[str, str], Any] = {(r["metric"], r["part"]): r for r in own}
    reduces = (r["value"] for r in own if r["metric"] == "collectives" and r["part"].startswith("all_reduce"))
    size, step = _bytes(own, "all_gather"), by_metric["step_ms", ""]["value"]
    exposed = statistics.median(by_metric["exposed_ms", ""]["samples"])
    note = "" if machine.is_gpu else "of a CPU"
    apart = by_metric.get(("loss_deviation", ""))
    return {
        "all-gather (bytes)": size,
        "of the baseline's": size / base if base else None,
        "all-reduces": sum(reduces),
        "reduce-scatter (bytes)": _bytes(own, "reduce_scatter"),
        "last loss": by_metric["loss", ""]["value"],
        "same loss": ""
        if apart is None
        else "yes"
        if apart["value"] == 0
        else f"{text.number(apart['value'], 2)} apart",
        "step (ms)": Cell(text.number(step), step, note=note),
        "exposed (ms)": Cell(text.number(exposed), exposed, note=note),
    }


def _bytes(rows: list[Record], collective: str) -> float:
    return sum(r["value"] for r in rows if r["metric"] == "wire_bytes" and r["part"].startswith(collective))


def _beside(arms: dict[tuple[str, str, str], list[Record]]) -> str:
    """What is gathered beside weights of linear layers."""
    weights: Any = next(
        (w for rows in arms.values() for r in rows if (w := resolved_of(r).get("weights"))), {}
    )
    return (
        f"{text.count(weights.get('linear'))} weights of linear layers are gathered, and with them "
        f"{text.count(weights.get('other'))} gains of norms, always in high precision."
    )
