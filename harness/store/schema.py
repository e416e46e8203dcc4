"""Schema: the columns of the store. Rows of any other `schema_version` are refused where they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Collection

JSON_COLUMNS = ("axes", "resolved", "flops", "timing", "env", "arm_fields")  # objects, as text
LONG_TEXTS = JSON_COLUMNS  # few distinct ones: read as dictionaries
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("run_id", pa.string()),
        ("sweep", pa.string()),
        ("suite", pa.string()),
        ("case_id", pa.string()),
        ("arm", pa.string()),
        ("arm_fields", pa.string()),  # JSON of harness.store.arm.Arm
        ("baseline", pa.string()),
        ("axes", pa.string()),
        ("seed", pa.int64()),
        ("resolved", pa.string()),
        ("metric", pa.string()),
        ("unit", pa.string()),
        ("better", pa.string()),
        ("regime", pa.string()),
        ("part", pa.string()),
        ("samples", pa.list_(pa.float64())),
        ("rounds", pa.list_(pa.int32())),
        ("sample_clock_mhz", pa.list_(pa.float64())),
        ("value", pa.float64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("cause", pa.string()),  # one of harness.store.cause.Cause; "" where the row has its number
        (
            "retryable",
            pa.bool_(),
        ),  # what kept it from being measured may have passed: resume= measures it again
        ("flops", pa.string()),
        ("bytes_moved", pa.float64()),
        ("timing", pa.string()),
        ("tries", pa.int32()),
        ("attempt", pa.int64()),  # of what was run again, the largest wins; see harness.store
        ("env_id", pa.string()),
        ("env", pa.string()),
        ("created_at", pa.string()),
    ]
)


def conform(table: pa.Table, columns: Collection[str] = SCHEMA.names) -> pa.Table:
    """Rows of one file as the store holds them in memory.

    Args:
        table: rows, with at least these columns.
        columns: the columns to return, in the order of `SCHEMA`.

    Returns:
        The rows; the columns of `LONG_TEXTS` are dictionaries.
    """
    return pa.table(
        {
            field.name: _encoded(table[field.name])
            if field.name in LONG_TEXTS
            else table[field.name].cast(field.type)
            for field in SCHEMA
            if field.name in columns
        }
    )


def _encoded(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    return column.cast(_DICTIONARY)
