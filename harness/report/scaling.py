"""Scaling: what a step is predicted to send, hold and take on GPUs that are not here (suite `scale`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.judge import gathered
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
    records = []
    for every in gathered(
        ((r["case_id"], r["arm"]), r) for r in machine.pick(suite="scale", status="ok")
    ).values():
        last = max(every, key=lambda r: str(r["run_id"]))
        own = {(r["metric"], r["part"]): r["value"] for r in every if r["run_id"] == last["run_id"]}
        resolved, axes = resolved_of(last), dict(text.axes_of(last["axes"]))
        record = {"world": axes.pop("world", None), "arm": last["arm"], "axes": last["axes"]}
        record |= {name: resolved.get(name) for name in ("tokens_per_s", "mfu_mixed")}
        record |= {"job": text.case_label(axes, without), "speedup": _speedup(resolved)}
        record |= {metric: value for (metric, part), value in own.items() if not part}
        record |= {
            part: value / _GB for (metric, part), value in own.items() if metric == "sent_bytes" and part
        }
        if size := own.get(("predicted_memory_bytes", "")):
            record["memory"] = _memory(size, resolved.get("fits", True))
        records.append(record | {"exposed": own.get(("predicted_step_ms", "communication"))})
    records.sort(key=lambda r: (r["job"], r["world"] or 0, r["arm"]))
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
