"""Scaling: what a step is predicted to send, hold and take on GPUs that are not here (suite `scale`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.table import Cell, Column, Table, make_table, number, number4, resolved_of
from harness.store import text
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.report.table import Record

_GB = 1e9
_SENT = {  # parts of `sent_bytes` -> heading
    "weights_forward": "weights forward",
    "weights_backward": "weights backward",
    "gradients": "gradients",
    "gradients_copies": "among copies",
    "activations_gathered": "activations gathered",
    "activations_scattered": "activations scattered",
}


def scale_table(machine: Machine) -> Table:
    """A row for each predicted step: what a GPU sends for what, its memory, its tokens/s and MFU."""
    records = _records(machine)
    if not records:
        return Table("scale", (), ())
    without = machine.constant_axes("scale")
    columns = [
        Column("job", lambda r: _job(r, without)),
        number("GPUs", "world", text.count),
        Column("arm", "arm"),
        number("step (ms)", "predicted_step_ms", number4, "predicted"),
        number("exposed (ms)", "exposed", hint="communication that nothing hides"),
        number("over bf16", _speedup_cell, hint="predicted, with its 95 % interval"),
        number("tokens/s/GPU", lambda r: r["resolved_"].get("tokens_per_s"), number4, "predicted"),
        number(
            "mixed MFU",
            lambda r: r["resolved_"].get("mfu_mixed"),
            text.percent,
            "FLOPs as PaLM counts them",
        ),
        number("memory (GB)", _memory_cell, hint="of one GPU, predicted; 1e9 bytes"),
        *(
            number(f"{heading} (GB)", part, hint="sent by a GPU in a step; 1e9 bytes", needs=part)
            for part, heading in _SENT.items()
        ),
    ]
    shared = text.axes_said(text.axes_of(records[0]["axes"]), sorted(without))
    caption = f"Predictions, all with {shared}." if shared else "Predictions."
    return make_table("scale", columns, sorted(records, key=lambda r: _order(r, without)), caption)


def _records(machine: Machine) -> list[dict[str, Any]]:
    """One for each case and arm of the newest run that has it."""
    frame = machine.frame
    own = frame[(frame["suite"] == "scale") & (frame["status"] == "ok")]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_of(own):
        key = row["case_id"], row["arm"]
        record = found.get(key)
        if record is None or row["run_id"] > record["run_id"]:
            axes = text.axes_of(row["axes"])
            record = {name: row[name] for name in ("run_id", "case_id", "arm", "axes")}
            record |= {"world": axes.get("world"), "resolved_": resolved_of(row)}
            record["predicted_speedup"] = record["resolved_"].get("predicted_speedup")
            found[key] = record
        elif row["run_id"] < record["run_id"]:
            continue
        if row["metric"] == "sent_bytes" and row["part"]:
            record[row["part"]] = row["value"] / _GB
        elif row["metric"] == "predicted_step_ms" and row["part"] == "communication":
            record["exposed"] = row["value"]
        elif not row["part"]:
            record[row["metric"]] = row["value"]
    return list(found.values())


def _order(record: Record, without: frozenset[str]) -> tuple[str, int, str]:
    """By job, then by size; runs at once end in any order."""
    return _job(record, without), record["world"] or 0, record["arm"]


def _job(record: Record, without: frozenset[str]) -> str:
    axes = {name: value for name, value in text.axes_of(record["axes"]).items() if name != "world"}
    return text.case_label(axes, without)


def _memory_cell(record: Record) -> Cell:
    size = record.get("predicted_memory_bytes")
    if size is None:
        return Cell("", None)
    fits = record["resolved_"].get("fits", True)
    return Cell(text.number(size / _GB, 3), size, "" if fits else "bad", "" if fits else "more than it has")


def _speedup_cell(record: Record) -> Cell:
    found = record["predicted_speedup"]
    if not found:
        return Cell("", None)
    said = f"{found['value']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"
    return Cell(said, found["value"], "", str(found["decision"]))
