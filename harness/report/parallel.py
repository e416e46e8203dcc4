"""Parallel: which ways of training in parallel run with which recipes, and what FSDP2 sends when weights
are gathered in FP8.

Nothing here is asserted: a cell without a row is empty. Where several runs have the same cell, the newest one counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.records import key_of
from harness.report.table import (
    Column,
    Record,
    columns,
    make_table,
    resolved_of,
    status_cell,
    table_of,
    word,
)  # fmt: skip
from harness.store import text
from harness.store.errors import Cause
from harness.store.printer import Cell, Table
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine
    from harness.report.table import Row

SUITE = "parallel"
GB = 1e9
REFUSES = "refuses: "  # before the message of fp8core; the cell's own word repeats it
_OTHERWISE = {
    "emulated": "emulated",
    "weights_gathered_as": "weights",
    "activations_gathered_as": "activations",
}


def matrix(machine: Machine) -> Table:
    """A row for each way, a column for each recipe."""
    found = _newest(machine)
    ways: dict[str, dict[str, Any]] = {}
    for (way, recipe), row in found.items():
        record, about = ways.setdefault(way, {"way": Cell(way)}), resolved_of(row)
        record[f"cell {recipe}"] = _cell(row)
        if about.get("doc") and not record["way"].note:
            record["way"] = Cell(way, note=about["doc"])
        if about.get("world"):
            record.setdefault("ranks", about["world"])
    recipes = [Column(recipe, f"cell {recipe}") for recipe in dict.fromkeys(recipe for _, recipe in found)]
    every = [*columns("compatibility"), *recipes]
    return make_table(f"compatibility-{machine.env_id}", every, list(ways.values()), sortable=False)


def reasons(machine: Machine) -> Table:
    """Why what does not run does not, and what runs otherwise than asked."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = {}  # (what, reason) -> way -> recipes
    for (way, recipe), record in _newest(machine).items():
        for note in _notes(record):
            by_reason.setdefault(note, {}).setdefault(way, []).append(recipe)
    rows = []
    for (what, reason), ways in sorted(by_reason.items()):
        alike = grouped((", ".join(recipes), way) for way, recipes in ways.items())
        for recipes_of, of in alike.items():
            rows.append({"what": word(what), "ways": ", ".join(of), "recipes": recipes_of, "reason": reason})
    return table_of(machine, "compatibility-reasons", rows)


def _notes(record: Record) -> list[tuple[str, str]]:
    """Remarks on a cell beside that it runs."""
    if record["status"] != "ok":
        return [(_word(record), text.reason(str(record["reason"])).removeprefix(REFUSES))]
    found = []
    for key, what in _OTHERWISE.items():
        value = resolved_of(record).get(key)
        given = value if isinstance(value, list) else [value]
        found += [(f"runs, {what}", str(way)) for way in given if way and way != "fp8"]
    return found


def _newest(machine: Machine) -> dict[tuple[str, str], Record]:
    """(way, recipe) -> its row: that of the deviation where it ran, else the one that says why not."""
    rows = sorted(machine.pick(suite=SUITE), key=lambda r: str(r["run_id"]))  # an id begins with its time
    kept = [r for r in rows if r["metric"] == "loss_deviation" or r["status"] != "ok"]
    return {(str(text.axes_of(r["axes"])["cell"]), r["arm"]): r for r in kept}


def _word(record: Record) -> str:
    if record["status"] == "failed":
        return "failed"
    return "refuses" if record["cause"] == Cause.REFUSED else "unsupported here"


def _cell(record: Record) -> Cell:
    if record["status"] != "ok":
        return word(_word(record))
    bound, apart = resolved_of(record).get("bound"), record["value"]
    return word("runs", f"{text.number(apart, 2)}, bound {text.number(bound, 2)}" if apart else "bit for bit")


# What ranks send


def gathers_table(machine: Machine) -> Table:
    """A row for each case and arm whose collectives were counted, or that did not come to it."""
    rows = machine.pick(suite=("train", "allgather"))
    arms = grouped(
        (key_of(r), r) for r in rows if (r["metric"] in _COUNTED if r["status"] == "ok" else _is_sharded(r))
    )
    records: list[Row] = []
    for key, every in arms.items():
        own = [r for r in every if r["status"] == "ok"] or every
        axes, about = text.axes_of(own[0]["axes"]), resolved_of(own[0])
        ways = about.get("weights_gathered_as") or [str(axes.get("param_dtype", ""))]
        record: Row = {"ranks": axes["ranks"], "arm": own[0]["arm"], "gathered": status_cell(own[0])}
        record["weights as"] = ", ".join(way.partition(":")[0] for way in ways)
        records.append(record)
        if own[0]["status"] != "ok":
            continue
        size = _sum(own, "wire_bytes", "all_gather")
        base = _sum(arms.get((*key[:2], own[0]["baseline"] or key[2]), []), "wire_bytes", "all_gather")
        apart = next((r["value"] for r in own if r["metric"] == "loss_deviation"), None)
        record |= {
            "gathered": size,
            "of_baseline": size / base if base else None,
            "reduces": _sum(own, "collectives", "all_reduce"),
            "scattered": _sum(own, "wire_bytes", "reduce_scatter"),
            "same": None if apart is None else f"{text.number(apart, 2)} apart" if apart else "yes",
        }
    return table_of(machine, "gathers", records, sortable=False)


def _is_sharded(record: Record) -> bool:
    return text.axes_of(record["axes"]).get("ranks", 1) != 1


_COUNTED = ("wire_bytes", "collectives", "loss_deviation")


def _sum(rows: Sequence[Record], metric: str, collective: str) -> float:
    return sum(r["value"] for r in rows if r["metric"] == metric and r["part"].startswith(collective))
