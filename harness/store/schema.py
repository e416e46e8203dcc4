"""Schema of a row: its columns, and what their values may be. The writer and the reader ask the same `faults`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from harness.store import case
from harness.store.errors import Cause, one_line
from harness.store.measurement import METRICS, REASON, Better, Measurement, Status
from harness.store.outside import parse
from harness.store.private import public
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

SCHEMA = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("run_id", pa.string()),
        ("sweep", pa.string()),
        ("suite", pa.string()),
        ("case_id", pa.string()),
        ("arm", pa.string()),
        ("arm_fields", pa.string()),  # JSON of harness.store.case.Arm
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
        ("cause", pa.string()),  # one of harness.store.errors.Cause; "" where the row has its number
        # what kept it from being measured may have passed: resume= measures it again
        ("retryable", pa.bool_()),
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
TEXTS = [field.name for field in SCHEMA if field.type == pa.string()]
JSON_COLUMNS = ("axes", "resolved", "flops", "timing", "env", "arm_fields")  # objects, as text
_NULLABLE = {"value", "bytes_moved"}  # where there is no number
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_ENCODED = pa.schema([(f.name, _DICTIONARY if f.name in TEXTS else f.type) for f in SCHEMA])

MOST_TIME = 1e100  # in seconds or milliseconds, or its inverse: squares and ratios of such times are numbers
_TIMES = [name for name, of in METRICS.items() if of.unit in ("s", "ms")]
# Most bytes of a text; of the names that are not here `NAME`.
NAME = 2**12
LONGEST = {"axes": 2**16, "reason": 4 * REASON, **dict.fromkeys(JSON_COLUMNS[1:], 2**24)}
_WORDS = {
    "status": get_args(Status),
    "better": get_args(Better),
    "regime": ("", "isolated", "sustained"),
}
_FACTS = {
    column: {name: kind for kind, names in kinds.items() for name in names}
    for column, kinds in beside(__file__, "facts.yaml").items()
}
_NONFINITE = ("inf", "-inf", "nan")  # as `public` writes them
_OTHERS = {
    "axes": "single value",
    "env": "single value",
    "flops": "number",
}  # kind of what is not named there
_TYPES: Mapping[str, tuple[type, ...]] = {
    "count": (int,),
    "number": (int, float),
    "figure": (int, float),
    "text": (str,),
    "single value": (str, int, float, bool),
    "list": (list,),
    "object": (dict,),
}


def _fits(kind: str, value: Any) -> bool:
    """Whether a value is of a kind, such as "number" or "object of number"."""
    outer, _, inner = kind.partition(" of ")
    if type(value) not in _TYPES[outer]:
        return kind == "figure" and value in _NONFINITE
    parts = value.values() if isinstance(value, dict) else value
    return not inner or all(_fits(inner, part) for part in parts)


def encoded(table: pa.Table, columns: Collection[str] = SCHEMA.names) -> pa.Table:
    """Rows with the columns of the schema, texts as dictionaries: equal ones are held, and checked, once.

    Args:
        table: rows, with at least these columns.
        columns: the columns to return, in the order of `SCHEMA`.

    Raises:
        pa.ArrowException: a column of another type.
    """
    fields = [field for field in _ENCODED if field.name in columns]
    return pa.table({f.name: _encoded(table[f.name], f.type) for f in fields}).combine_chunks()


def _encoded(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    if wanted == _DICTIONARY and not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    return (column if column.type == wanted else column.cast(wanted)).unify_dictionaries()


def in_memory(table: pa.Table) -> pa.Table:
    """Rows of `encoded` as they are held: texts that are no JSON have few equal ones and are no dictionaries."""
    kept = {name: table[name].type for name in JSON_COLUMNS if name in table.column_names}
    return table.cast(
        pa.schema([(name, kept.get(name, SCHEMA.field(name).type)) for name in table.column_names])
    )


def faults(table: pa.Table) -> dict[int, str]:
    """The rows that the store neither writes nor returns, by number, each with its first fault.

    Args:
        table: rows as `encoded` gives them; the columns that it has are checked.
    """
    found: dict[int, str] = {}
    for row, fault in _faults(table):
        found.setdefault(row, fault)
    return found


def _faults(table: pa.Table) -> Iterator[tuple[int, str]]:
    for name in table.column_names:
        column = table[name].combine_chunks()
        if name not in _NULLABLE and column.null_count:
            yield from _marked(column.is_null(), f"{name} is missing")
        if pa.types.is_dictionary(column.type) and (wrong := _faults_of_texts(name, column.dictionary)):
            codes = column.indices.fill_null(-1).to_numpy()
            for row in np.flatnonzero(np.isin(codes, [*wrong])).tolist():
                yield row, f"{name}: {wrong[codes[row]]}"
    if "bytes_moved" in table.column_names:
        infinite = compute.invert(compute.is_finite(table["bytes_moved"]))
        yield from _marked(infinite.fill_null(False), "bytes_moved is no finite number")
    if {"metric", "unit"} <= {*table.column_names}:
        for metric in {*table["metric"].unique().to_pylist()} & METRICS.keys():
            unit = METRICS[metric].unit
            other = compute.and_not(is_in(table, "metric", [metric]), is_in(table, "unit", [unit]))
            yield from _marked(other, f"{metric} in another unit than {unit}")
    if {"status", "reason"} <= {*table.column_names}:
        silent = compute.and_not(is_in(table, "reason", [""]), is_in(table, "status", ["ok"]))
        yield from _marked(silent, "no number, and no reason why")
    if "samples" in table.column_names:
        yield from _faults_of_samples(table)


def is_in(table: pa.Table, name: str, values: Iterable[object]) -> pa.Array:
    """Which rows have one of the values; `compute.is_in` would write a dictionary out, however long its texts are."""
    column, wanted = table[name].combine_chunks(), pa.array(list(values), SCHEMA.field(name).type)
    if not pa.types.is_dictionary(column.type):
        return compute.is_in(column, wanted)
    return compute.is_in(column.dictionary, wanted).take(column.indices).fill_null(False)


def _marked(mask: Any, fault: str) -> Iterator[tuple[int, str]]:
    return ((row, fault) for row in np.flatnonzero(mask).tolist())


def _faults_of_texts(name: str, texts: pa.StringArray) -> dict[int, str]:
    """The texts of a column that no row may have, by number."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return {
            i: "bytes that are no UTF-8"
            for i, each in enumerate(texts.cast(pa.binary()).to_pylist())
            if each.decode("utf-8", "replace").encode() != each
        }
    if name in _WORDS or name in JSON_COLUMNS:
        found = enumerate(fault_of_text(name, text) for text in texts.to_pylist())
        return {i: fault for i, fault in found if fault}
    lengths, most = compute.binary_length(texts).to_numpy(), LONGEST.get(name, NAME)
    return {int(i): _too_long(int(lengths[i]), most) for i in np.flatnonzero(lengths > most)}


def _too_long(size: int, most: int) -> str:
    return f"{size:,} bytes; expected at most {most:,}"


def fault_of_text(name: str, text: str) -> str:
    """What is wrong with the text of a column; "" for nothing."""
    if (size := len(text.encode())) > (most := LONGEST.get(name, NAME)):
        return _too_long(size, most)
    if words := _WORDS.get(name):
        return "" if text in words else f"{text!r}; expected one of {', '.join(words)}"
    if name not in JSON_COLUMNS:
        return ""
    try:
        given = parse(text)
        if name == "arm_fields":
            case.from_json(text)
    except ValueError as error:
        return str(error)
    for key, value in given.items():
        kind = _FACTS.get(name, {}).get(key) or _OTHERS.get(name)
        unknown = value is None and name != "flops" and kind != "count"
        if kind and not (unknown or _fits(kind, value)):
            return f"{key} is {value!r:.60}; expected {kind}"
    return ""


def _faults_of_samples(table: pa.Table) -> Iterator[tuple[int, str]]:
    samples, has = table["samples"].combine_chunks(), {*table.column_names}
    counts = compute.list_value_length(samples).fill_null(0).to_numpy()
    drawn = samples.flatten()
    yield from _inside(samples, compute.is_nan(drawn).fill_null(True), "samples that are no number")
    if "metric" in has:
        size, times = np.abs(drawn.to_numpy(zero_copy_only=False)), is_in(table, "metric", _TIMES).to_pylist()
        beyond = np.isfinite(size) & (size > 0) & ((size < 1 / MOST_TIME) | (size > MOST_TIME))
        unlike = _inside(
            samples, pa.array(beyond), "a time that no clock gives, whose ratios may be no numbers"
        )
        yield from (each for each in unlike if times[each[0]])
    for name in {"rounds", "sample_clock_mhz"} & has:
        beside = table[name].combine_chunks()
        sizes = compute.list_value_length(beside).fill_null(0).to_numpy()
        yield from _marked((sizes != 0) & (sizes != counts), f"another number of {name} than of samples")
        yield from _inside(beside, beside.flatten().is_null(), f"{name} that are no number")
        if name == "rounds" and "metric" in has:
            of_row, steps = (
                compute.list_parent_indices(beside).to_numpy(),
                beside.flatten().to_numpy(zero_copy_only=False),
            )
            back = of_row[1:][(np.diff(steps) <= 0) & (np.diff(of_row) == 0)]
            curves = np.flatnonzero(
                is_in(table, "metric", (name for name, of in METRICS.items() if of.series))
            )
            yield from (
                (int(row), "a curve whose steps do not increase") for row in np.intersect1d(back, curves)
            )
    held = counts > 0
    if "status" in has:
        measured = is_in(table, "status", ["ok", "partial"]).to_numpy(zero_copy_only=False)
        yield from _marked(measured != held, "a status that contradicts its samples")
    if "value" in has:
        values, drawn = table["value"].to_numpy(), drawn.to_numpy(zero_copy_only=False)
        inside = np.isnan(values)
        if held.any():
            starts, own = (np.cumsum(counts) - counts)[held], values[held]
            least, most = (bound.reduceat(drawn, starts) for bound in (np.minimum, np.maximum))
            inside[held] = (least <= own) & (own <= most)
        yield from _marked(~inside, "a value that its samples do not have between them")


def _inside(lists: pa.ListArray, mask: pa.BooleanArray, fault: str) -> Iterator[tuple[int, str]]:
    """The rows in whose list a value is marked."""
    marked = compute.list_parent_indices(lists).filter(mask).unique()
    return ((row, fault) for row in marked.to_pylist())


def rows_of(
    measurements: Sequence[Measurement], constant: Mapping[str, object]
) -> tuple[list[Measurement], pa.Table]:
    """Rows as the store takes them: one that it cannot hold is a failed row instead, which says why.

    Args:
        measurements: the rows.
        constant: the columns that are equal in all of them, themselves without a fault.
    """
    try:
        table = _table(measurements, constant)
        wrong = faults(table)
        if not wrong:
            return list(measurements), table
        fault = wrong[min(wrong)]
    except Exception as error:  # noqa: BLE001 - what a suite hands over may raise anything when it is written
        fault = one_line(error)
    if len(measurements) > 1:
        alone = [rows_of([each], constant) for each in measurements]
        return [row for rows, _ in alone for row in rows], pa.concat_tables(table for _, table in alone)
    failed = _failed(measurements[0], fault)
    return [failed], _table([failed], constant)


def _failed(row: Measurement, fault: str) -> Measurement:
    """The row in the place of one that cannot be stored."""
    names = {
        key: _name(getattr(row, key)) for key in ("suite", "case_id", "arm", "baseline", "part", "regime")
    }
    axes = row.axes if isinstance(row.axes, str) and not fault_of_text("axes", public(row.axes)) else "{}"
    return replace(
        row, **names, axes=axes, arm_fields=row.arm_fields if names["arm"] == row.arm else None,
        seed=_int(row.seed, 63), tries=_int(row.tries, 31), status="failed", cause=Cause.UNSTORABLE,
        reason=f"the row cannot be stored: {fault}"[:REASON], samples=(), rounds=(), sample_clock_mhz=(),
        resolved={}, flops={}, timing={}, bytes_moved=None,
    )  # fmt: skip


def _name(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace")[:NAME].decode("utf-8", "ignore")


def _int(number: int, bits: int) -> int:
    return max(-(2**bits), min(int(number), 2**bits - 1))


def _table(measurements: Iterable[Measurement], constant: Mapping[str, object]) -> pa.Table:
    return pa.Table.from_pylist([{**m.as_row(), **constant} for m in measurements], schema=_ENCODED)
