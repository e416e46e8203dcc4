"""Scaling: what a step is predicted to send, hold and take on GPUs that are not here (suite `scale`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.table import Cell, Table, resolved_of, table_of
from harness.store import text

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.report.table import Record

_GB = 1e9


def scale_table(machine: Machine) -> Table:
    """A row for each predicted step: what a GPU sends for what, its memory, its tokens/s and MFU.

    One for each case and arm of the newest run that has it, by job and then by size: runs at once end in any order.
    """
    without = machine.constant_axes("scale")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(machine.pick(suite="scale", status="ok"), key=lambda r: str(r["run_id"])):
        key, resolved = (row["case_id"], row["arm"]), resolved_of(row)
        if found.get(key, {}).get("run_id") != row["run_id"]:
            axes = dict(text.axes_of(row["axes"]))
            world = axes.pop("world", None)
            found[key] = {name: row[name] for name in ("run_id", "arm", "axes")} | {"world": world}
            found[key] |= {name: resolved.get(name) for name in ("tokens_per_s", "mfu_mixed")}
            found[key] |= {"job": text.case_label(axes, without), "speedup": _speedup(resolved)}
        record = found[key]
        if row["metric"] == "sent_bytes" and row["part"]:
            record[row["part"]] = row["value"] / _GB
        elif (row["metric"], row["part"]) == ("predicted_memory_bytes", ""):
            record["memory"] = _memory(row["value"], resolved.get("fits", True))
        elif (row["metric"], row["part"]) == ("predicted_step_ms", "communication"):
            record["exposed"] = row["value"]
        elif not row["part"]:
            record[row["metric"]] = row["value"]
    records = sorted(found.values(), key=lambda r: (r["job"], r["world"] or 0, r["arm"]))
    shared = text.axes_said(text.axes_of(records[0]["axes"]), sorted(without)) if records else ""
    return table_of(
        machine, "scale", records, f"Predictions, all with {shared}." if shared else "Predictions."
    )


def _memory(size: float, fits: bool) -> Cell:
    return Cell(text.number(size / _GB, 3), size, "" if fits else "bad", "" if fits else "more than it has")


def _speedup(resolved: Record) -> Cell | None:
    found = resolved.get("predicted_speedup")
    if not isinstance(found, dict):
        return None
    said = f"{found['value']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"
    return Cell(said, found["value"], note=str(found["decision"]))
