"""Gathers: what FSDP2 sends when weights are gathered in FP8, beside high precision and beside torchao."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from harness.report.table import Cell, Column, Record, Table, number_cell, resolved_of
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
_TITLES = (
    ("ranks", True), ("weights as", False), ("arm", False), ("all-gather (bytes)", True), ("of the baseline's", True),
    ("all-reduces", True), ("reduce-scatter (bytes)", True), ("last loss", True), ("same loss", False),
    ("step (ms)", True), ("exposed (ms)", True),
)  # fmt: skip


def gathers_table(machine: Machine) -> Table:
    """A row for each case and arm; an arm that could not run says why in the table of failed and skipped rows."""
    frame = machine.frame
    arms: dict[tuple[str, str, str], list[Record]] = {}
    for r in rows_of(frame[frame["suite"] == SUITE]):
        arms.setdefault((r["run_id"], r["case_id"], r["arm"]), []).append(r)
    bytes_of = {key: _bytes(rows, "all_gather") for key, rows in arms.items()}
    rows = []
    for key, own in arms.items():
        axes: Any = text.axes_of(own[0]["axes"])
        world = axes["ranks"]
        lead = (Cell(str(world), world), Cell(str(axes["param_dtype"])), Cell(own[0]["arm"]))
        if any(r["status"] != "ok" for r in own):
            status = own[0]["status"]
            style = "bad" if status == "failed" else "muted"
            rows.append((*lead, Cell(status, None, style), *(Cell("", None) for _ in _TITLES[4:])))
            continue
        rows.append(
            (
                *lead,
                *_figures(
                    own, bytes_of[key], bytes_of.get((*key[:2], own[0]["baseline"] or key[2])), machine
                ),
            )
        )
    columns = tuple(Column(title, numeric) for title, numeric in _TITLES)
    return Table(
        f"gathers-{machine.env_id}", columns, tuple(rows), _beside(arms) if rows else "", sortable=False
    )


def _figures(own: list[Record], size: float, base: float | None, machine: Machine) -> tuple[Cell, ...]:
    by_metric: dict[tuple[str, str], Any] = {(r["metric"], r["part"]): r for r in own}
    reduces = sum(
        r["value"] for r in own if r["metric"] == "collectives" and r["part"].startswith("all_reduce")
    )
    apart = by_metric.get(("loss_deviation", ""))
    same = (
        "" if apart is None else "yes" if apart["value"] == 0 else f"{text.number(apart['value'], 2)} apart"
    )
    exposed = statistics.median(by_metric["exposed_ms", ""]["samples"])
    note = "" if machine.is_gpu else "of a CPU"
    return (
        Cell(text.count(size), size),
        number_cell(size / base if base else None, 4),
        Cell(text.count(reduces), reduces),
        Cell(text.count(_bytes(own, "reduce_scatter")), _bytes(own, "reduce_scatter")),
        number_cell(by_metric["loss", ""]["value"], 7),
        Cell(same),
        Cell(text.number(by_metric["step_ms", ""]["value"]), by_metric["step_ms", ""]["value"], note=note),
        Cell(text.number(exposed), exposed, note=note),
    )


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
