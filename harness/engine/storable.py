"""Rows that no file can hold: a suite may put any object into one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from harness import store
from harness.store.cause import Cause
from harness.store.errors import one_line

if TYPE_CHECKING:
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
    why = f"its row cannot be stored: {_printable(why_not)}"
    return replace(
        shown,
        status="failed",
        reason=f"{shown.reason}; {why}" if shown.reason else why,
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
