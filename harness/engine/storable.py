"""Rows that no file can hold, or no other process be sent: a suite may put any object into one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from harness import store
from harness.engine.worker_process import wire
from harness.store.cause import Cause
from harness.store.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.store.measurement import Measurement


def refusal(measurement: Measurement) -> str:
    """Why the store could not hold a row; "" where it could."""
    try:
        pa.Table.from_pylist([measurement.as_row()], schema=store.SCHEMA)
    except Exception as error:  # noqa: BLE001 - an object in it may raise anything
        return one_line(error)
    return ""


def made_storable(measurement: Measurement) -> Measurement:
    """The row with its texts made printable, or a failed one in its place."""
    shown = replace(measurement, reason=_printable(measurement.reason), part=_printable(measurement.part))
    why_not = refusal(shown)
    if not why_not:
        return shown
    return _failed(shown, f"its row cannot be stored: {_printable(why_not)}")


def made_sendable(rows: Iterable[Measurement]) -> list[Measurement]:
    """The rows, each that does not let itself be pickled replaced by a failed one."""
    found = []
    for measurement in rows:
        try:
            wire(measurement)
        except Exception as error:  # noqa: BLE001 - an object in it may raise anything
            why = f"its row cannot be sent to the process that stores it: {_printable(one_line(error))}"
            measurement = _failed(measurement, why)
        found.append(measurement)
    return found


def _failed(measurement: Measurement, why: str) -> Measurement:
    """A failed row in place of this one, without what a suite has put into it."""
    reason = measurement.reason
    return replace(
        measurement,
        status="failed",
        reason=f"{reason}; {why}" if reason else why,
        cause=Cause.UNSTORABLE,
        resolved={},
        samples=(),
        rounds=(),
        sample_clock_mhz=(),
        flops={},
        bytes_moved=None,
        timing={},
    )


def _printable(text: str) -> str:
    """A text that any file can hold: bytes that were no text, which Python keeps as surrogates, are written out."""
    return text.encode(errors="backslashreplace").decode()
