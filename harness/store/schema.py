"""Schema: the columns of the store, and how rows of an older `schema_version` are brought up to them.

The words of an older row's reason decide its cause here and nowhere else: before version 4 there was no other record.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as compute

from harness.store.cause import DEFAULT, RETRYABLE, Cause
from harness.store.measurement import METRICS, SCHEMA_VERSION, TIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

JSON_COLUMNS = ("axes", "resolved", "flops", "timing", "env")  # objects, as text
LONG_TEXTS = (*JSON_COLUMNS, "arm_fields")  # few distinct ones: read as dictionaries
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

# What stands in a column that an older schema_version lacks; elsewhere null
_OF_CAUSE = {"cause", "retryable"}
_NO_CAUSE = {"cause": str(Cause.ERROR), "retryable": False}  # where a row of this version has none
_FILL = {"part": "", "tries": 1, "attempt": 0}

# How a reason began, or what it held, that the harness wrote before version 4: (status, pattern, cause, retryable).
# The first that fits counts. Whole sentences where an exception's own words could begin in the same way.
_CUT_OFF = re.compile(r"partial: \d+ of at least \d+ rounds, then it was cut off")
_WORDS: tuple[tuple[str, re.Pattern[str], Cause], ...] = tuple(
    (status, re.compile(pattern), cause)
    for status, pattern, cause in (
        ("skipped", r"time budget of \S+ s was spent before this (case|run); ", Cause.BUDGET),
        ("skipped", r"refuses: ", Cause.REFUSED),
        ("skipped", r"out of memory, predicted: ", Cause.OOM),
        ("skipped", r".*\bpip install ", Cause.MISSING),
        ("skipped", r"torch\.compile needs |triton needs a C compiler ", Cause.MISSING),
        ("failed", r"the device was lost in (arm|case) .*; resume=RUN_ID runs ", Cause.DEVICE_LOST),
        ("failed", r"its process died (twice|\d+ times) \(.*; resume=RUN_ID runs ", Cause.DIED),
        ("failed", r"worker: ", Cause.DIED),
        ("failed", r"no sign of life for \S+ s|not done within \S+ s", Cause.TIMEOUT),
        ("failed", r"out of memory: ", Cause.OOM),
        ("failed", r"(\S+; |numerics: ).*FP8 did not run as asked", Cause.NOT_FP8),
        ("failed", r"numerics: ", Cause.NUMERICS),
        ("failed", r"(?i).*\b(loss|grad_norm) is (nan|-?inf)\b", Cause.DIVERGED),
        ("failed", r"nothing was compiled: |\d+ graph break\(s\): |\d+ graph\(s\) compiled ", Cause.COMPILE),
        ("failed", r".*its row cannot be stored: ", Cause.UNSTORABLE),
        ("failed", r"arm \S+ lost the device: ", Cause.BASELINE),
    )
)


def stored_columns(columns: Collection[str], present: Collection[str]) -> list[str]:
    """The columns of a file that `conform` needs for some columns of `SCHEMA`."""
    needed = {*columns, "schema_version"}
    if needed & _OF_CAUSE:  # both or neither: a file without them is from before version 4
        needed |= _OF_CAUSE if set(present) >= _OF_CAUSE else {"status", "metric", "reason"}
    return [name for name in present if name in needed or name not in SCHEMA.names]


def conform(table: pa.Table, columns: Collection[str] = SCHEMA.names) -> pa.Table:
    """Brings rows of any schema_version up to `SCHEMA`.

    Missing columns are filled, unknown ones dropped with a RuntimeWarning; `cause` and `retryable` of rows from before
    version 4 are derived from their status, metric and reason.

    Args:
        table: rows of one file, with the columns that `stored_columns` names.
        columns: the columns to return, in the order of `SCHEMA`.

    Returns:
        The rows; the columns of `LONG_TEXTS` are dictionaries.
    """
    count = table.num_rows
    derived = {} if set(table.column_names) >= _OF_CAUSE or not count else _older_causes(table, columns)
    found = {}
    for field in SCHEMA:
        name = field.name
        if name not in columns:
            continue
        column = derived.get(name)
        if column is None:
            column = (
                table[name]
                if name in table.column_names
                else pa.repeat(pa.scalar(_FILL.get(name), field.type), count)
            )
        if name in _OF_CAUSE:
            column = compute.fill_null(column, _NO_CAUSE[name])
        found[name] = _encoded(column) if name in LONG_TEXTS else column.cast(field.type)
    if count and "schema_version" in table.column_names:
        newest = compute.max(table["schema_version"]).as_py()
        if newest > SCHEMA_VERSION:
            warnings.warn(
                f"rows of schema_version {newest} read by a harness that knows {SCHEMA_VERSION}; "
                "columns that it does not know are left out",
                RuntimeWarning,
                stacklevel=3,
            )
    return pa.table(found)


def _encoded(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    return column.cast(_DICTIONARY)


def _older_causes(table: pa.Table, columns: Collection[str]) -> dict[str, pa.Array]:
    """`cause` and `retryable` of rows that were stored before they were columns."""
    if not _OF_CAUSE & {*columns}:
        return {}
    texts = (
        table[name].to_pylist() if name in table.column_names else [None] * len(table)
        for name in ("status", "metric", "reason")
    )
    known: dict[tuple[str, str, str], tuple[str, bool]] = {}
    found = [
        known.get(key) or known.setdefault(key, _cause_of_older(*key)) for key in zip(*texts, strict=True)
    ]
    return {
        "cause": pa.array([cause for cause, _ in found], pa.string()),
        "retryable": pa.array([retryable for _, retryable in found], pa.bool_()),
    }


def _cause_of_older(status: str | None, metric: str | None, reason: str | None) -> tuple[str, bool]:
    """Cause and retryable of a row that was stored before either was a column."""
    words = reason or ""
    if status == "partial":
        # The words of the cut came first, those of what cut it off behind them.
        behind = _CUT_OFF.sub("", words, count=1).partition("measures the case again; ")[2]
        cut_by = _first_fit("failed", behind) or Cause.INTERRUPTED
        return str(cut_by), True
    if status not in ("skipped", "failed"):
        return "", False
    cause = _first_fit(status, words)
    if cause is None and status == "failed" and metric in METRICS and metric not in (*TIMES, "loss"):
        cause = Cause.NUMERICS  # a figure of a check: it fails only where it breaks its bound
    cause = cause or DEFAULT[status]
    return str(cause), cause in RETRYABLE


def _first_fit(status: str, words: str) -> Cause | None:
    return next((cause for of, pattern, cause in _WORDS if of == status and pattern.match(words)), None)


def sound_json(table: pa.Table, is_object: Callable[[str], bool]) -> tuple[pa.Table, list[str]]:
    """Replaces texts of the JSON columns that are no JSON object by "{}".

    Args:
        table: rows as `conform` returns them.
        is_object: whether a text is a JSON object.

    Returns:
        The rows, and in words which columns were damaged in how many rows and what the first one began with.
    """
    problems = []
    for name in table.column_names:
        if name not in JSON_COLUMNS:
            continue
        texts = {text for chunk in table[name].chunks for text in chunk.dictionary.to_pylist()}
        bad = {text for text in texts - {None, ""} if not is_object(text)}
        if not bad:
            continue
        values = table[name].to_pylist()
        hit = [index for index, text in enumerate(values) if text in bad]
        if not hit:  # a dictionary may hold texts of rows that were left out
            continue
        begins = str(values[hit[0]])[:40]
        problems.append(
            f"column {name!r} of {len(hit)} of {len(values)} rows is no JSON object (it begins with {begins!r}); "
            "they are read as empty"
        )
        whole = pa.array(["{}" if text in bad else text for text in values], pa.string())
        table = table.set_column(table.schema.get_field_index(name), name, whole.dictionary_encode())
    return table, problems
