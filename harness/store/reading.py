"""Reading: the rows of runs as one frame, whole or a part of it.

Columns and rows that nobody asked for are not decoded. Which attempt of a case counts is decided over all rows of that
case, so the selection of rows never brings back an attempt that a later one replaced. JSON texts, which rows of a case
share, are held once each.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
import warnings
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from pyarrow import parquet

from harness.store.errors import UsageError, unknown
from harness.store.measurement import SCHEMA_VERSION, TIMES
from harness.store.outside import from_json, parse, read_bytes
from harness.store.schema import JSON_COLUMNS, SCHEMA, TEXTS, encoded, faults, in_memory, is_in

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    import pandas as pd
    from numpy.typing import NDArray


# Low bits of an attempt's number that are drawn: two writers that begin within a millisecond differ
_DRAWN = 20


DECIDED_BY = ("run_id", "case_id", "arm", "metric", "rounds", "status", "retryable", "attempt")


def that_count(frame: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of the attempt that counts, for each thing that was measured.

    The arms of a timed case are stored together and compared round by round, so one attempt stands for all of them. The
    runs of a trial suite are stored as each ends, so each arm has a last attempt of its own.

    Args:
        frame: all rows of the cases, with the columns `DECIDED_BY`.
    """
    attempt = frame["attempt"]
    case = [frame["run_id"], frame["case_id"]]
    timed = frame["metric"].isin(TIMES).groupby(case, dropna=False).transform("any")
    unit = frame.groupby([*case, frame["arm"].mask(timed, "")], dropna=False).ngroup()
    waits = frame["retryable"]
    tried = ~waits & (frame["status"] != "skipped")
    sitting = [unit, attempt]
    partial = (frame["status"] == "partial").groupby(sitting).transform("any")
    whole = ~waits.groupby(sitting).transform("any")
    some = tried.groupby(sitting).transform("any")
    # Prefer a complete attempt, then one whose measured arms are complete, then one that was cut off, then a deferred one.
    tier = whole.astype(int) * 3 + (~whole & some & ~partial) * 2 + (~whole & partial)
    best = tier == tier.groupby(unit).transform("max")
    if partial.any():  # of several that were cut off, the one with the most rounds
        rounds = frame["rounds"].map(lambda of: max(of, default=-1) + 1).where(best & (tier == 1), 0)
        most = rounds.groupby(sitting).transform("max")
        best &= most == most.where(best, -1).groupby(unit).transform("max")
    last = attempt.where(best, -1)
    return best & (last == last.groupby(unit).transform("max"))


def next_attempt(last: int) -> int:
    """A number for an attempt that begins now: nanoseconds since 1970, the last bits drawn.

    Args:
        last: the largest number that the run holds in any of its shards; it is exceeded, since a clock may be set back, or
            lie behind another machine's.
    """
    return max(time.time_ns() >> _DRAWN, (last >> _DRAWN) + 1) << _DRAWN | secrets.randbits(_DRAWN)


REPLACES = b"harness.replaces"  # metadata of a compacted file: the part names whose rows it holds
_UNIQUE = re.compile(r"(part|rows)-\d{20}-[0-9a-f]{6}\.parquet")  # a name that no two files have by chance
_OF_A_CASE = {"run_id", "sweep", "suite", "case_id", "seed"}  # equal in all rows of a case
_PUSHED = {*_OF_A_CASE, "metric"}  # by which rows are left out before they are checked
_ATTEMPTS_OF_A_CASE = ("run_id", "case_id", "attempt")
# Encodings whose texts take, as a dictionary, no more than the file says that they do
_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
LIMIT = "HARNESS_READ_GIB"  # environment variable
LIMIT_GIB = 1.0  # a million rows take 0.7


@dataclass(frozen=True, slots=True)
class RowsFile:
    """One file of a run.

    Attributes:
        path: the file.
        rows: the sound ones.
        replaces: names of the parts whose rows it holds as well.
        problem: how many rows are left out, and why; "" for none.
    """

    path: Path
    rows: pa.Table
    replaces: tuple[str, ...]
    problem: str


@dataclass(slots=True)
class ReadLimits:
    """Memory that the rows of one command may take.

    Attributes:
        most: bytes.
        taken: bytes of it that rows take which were read.
    """

    most: int
    taken: int = 0

    @classmethod
    def of(cls, gib: float | None) -> ReadLimits:
        """So many GiB; None: by default, or as the environment says.

        Raises:
            UsageError: the environment says no number above 0.
        """
        given = gib if gib is not None else os.environ.get(LIMIT, LIMIT_GIB)
        try:
            most = float(given) * 2**30
        except ValueError:
            most = math.nan
        if not 0 < most < math.inf:
            raise UsageError(f"{LIMIT}={given}: expected a number above 0, such as {LIMIT}=4")
        return cls(int(most))

    def check(self, size: int) -> None:
        """Refuses what does not fit.

        Raises:
            ValueError: names the limit and how to raise it.
        """
        if self.taken + size > self.most:
            raise ValueError(
                f"its rows take {size / 2**30:.2g} GiB in memory, and {self.taken / 2**30:.2g} of the "
                f"{self.most / 2**30:g} GiB that one command may read are taken: {LIMIT}="
                f"{math.ceil((self.taken + size) / 2**30 + 0.5)} allows more"
            )


def read(
    paths: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    where: Mapping[str, object] | None = None,
    all_attempts: bool = False,
    expand: bool = False,
    limit_gib: float | None = None,
) -> pd.DataFrame:
    """Reads runs into one frame, one row a (case, arm, metric).

    Args:
        paths: Parquet files, run folders, or folders of runs (searched downward).
        columns: the columns to return, in this order; by default all. Others are not decoded.
        where: values that rows must have, by column or by axis: one value, or several of which one must fit
            (`{"suite": "gemm", "metric": ["time_ms", "loss"], "M": 4096}`). It selects among the rows that count: of
            what was measured again, those of the last attempt.
        all_attempts: keep all rows of what was measured again; by default the last attempt wins.
        expand: add a column for each axis of the cases, under its own name (`frame.M`), or as `axes.NAME` where the
            store has a column of that name (`axes.seed`); None in the rows of cases without that axis.
        limit_gib: memory that the decoded rows may take; by default 1, or the environment variable HARNESS_READ_GIB. A
            file beyond it is left out.

    Returns:
        The columns of `SCHEMA`, and `case_axes`: the same text as `axes`, under a name that pandas has no other use for
        (`frame.axes` is pandas' own). `frame.attrs["problems"]` says of each file what could not be read and why, rows
        that no harness writes among it; a warning says it too; columns that were not asked for are not looked at.
        `frame.attrs["files"]` are the files that were read.

    Raises:
        UsageError: a path does not exist, a name is neither a column nor an axis of these runs, or `where` names a column
            of lists.
    """
    limits = ReadLimits.of(limit_gib)
    frame = open_run(paths, limits, columns=columns, where=where, all_attempts=all_attempts, expand=expand)
    for problem in frame.attrs["problems"]:
        warnings.warn(f"skipped: {problem}", RuntimeWarning, stacklevel=2)
    return frame


def open_run(
    paths: str | Path | Sequence[str | Path],
    limits: ReadLimits | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: Mapping[str, object] | None = None,
    all_attempts: bool = False,
    expand: bool = False,
) -> pd.DataFrame:
    """`read` for a command, which reports `attrs["problems"]` in its own words and not as a warning of Python's.

    One that reads several times and keeps all of it gives the same `limits` each time.
    """
    returned = _returned(columns)
    fitting = {name: _alternatives(name, value) for name, value in (where or {}).items()}
    of_rows = fitting.keys() & set(SCHEMA.names)
    needed = {*returned} - {"case_axes"} | of_rows
    if expand or "case_axes" in returned or fitting.keys() - of_rows:
        needed.add("axes")
    named = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    kept, table, problems = _rows(named, needed, fitting, all_attempts, limits or ReadLimits.of(None))
    frame = _frame(_matching(table, fitting).select([name for name in SCHEMA.names if name in needed]))
    axes = _axes(frame) if expand else {}
    if "case_axes" in returned:
        frame["case_axes"] = frame["axes"]
    frame = frame[list(returned)].assign(**axes)
    # Text, not objects: pandas writes `attrs` along with the frame.
    frame.attrs["problems"] = problems
    frame.attrs["files"] = [str(part.path) for part in kept]
    return frame


def _rows(
    named: Sequence[Path],
    needed: Collection[str],
    where: Mapping[str, list[Any]],
    all_attempts: bool,
    limits: ReadLimits,
) -> tuple[list[RowsFile], pa.Table, list[str]]:
    """The files that count, their rows that may be asked for, and what could not be read."""
    of_cases = {name: where[name] for name in where.keys() & _OF_A_CASE}
    # Cases with several attempts: all their rows are read, to decide which counts
    contested: set[str | None] = set()
    if not all_attempts and len(of_cases) < len(where):
        kept = each_once(read_parts(named, _ATTEMPTS_OF_A_CASE, of_cases)[0])
        contested = _contested(_together(kept, _ATTEMPTS_OF_A_CASE))
    taken = limits.taken
    for attempt in range(4):
        limits.taken = taken
        decided_by = () if all_attempts else DECIDED_BY if contested or attempt else _ATTEMPTS_OF_A_CASE
        columns = {*needed, *decided_by}
        parts, problems, vanished = read_parts(named, columns, where, contested, limits)
        kept = each_once(parts)
        table = _together(kept, columns)
        more = set() if all_attempts else _contested(table) - contested
        # A run that closed meanwhile has moved its rows to another file: look again
        if not (vanished or more):
            break
        contested |= more
    if contested:
        table = _last_attempts(table, contested)
    return kept, table, problems


def _returned(columns: Sequence[str] | None) -> tuple[str, ...]:
    """The columns to return; UsageError for one that there is not."""
    known = (*SCHEMA.names, "case_axes")
    if columns is None:
        return known
    if isinstance(columns, str):
        raise UsageError(f"columns={columns!r}: expected a list of names, such as columns=[{columns!r}]")
    for name in columns:
        if name not in known:
            raise unknown("column", name, known)
    return tuple(dict.fromkeys(columns))


def _alternatives(name: str, value: object) -> list[Any]:
    """The values of which a row must have one; UsageError where the column cannot have them."""
    values = [*value] if isinstance(value, list | tuple | set | frozenset) else [value]
    if name not in SCHEMA.names:
        return values
    expected = SCHEMA.field(name).type
    if pa.types.is_list(expected):
        raise UsageError(f"where={{{name!r}: ...}}: it holds lists; select by a column of single values")
    try:
        pa.array(values, expected)
    except (pa.ArrowException, TypeError, ValueError):
        raise UsageError(
            f"where={{{name!r}: {value!r}}}: the column holds {expected}, this is none or no list of them"
        ) from None
    return values


def each_once(parts: Sequence[RowsFile]) -> list[RowsFile]:
    """The files without those whose rows another one holds: copies of it, and what it was compacted from."""
    replaced = {name for part in parts for name in part.replaces}
    found: dict[Hashable, RowsFile] = {}
    for part in parts:
        name = part.path.name
        if name not in replaced:
            found.setdefault(part.replaces or (name if _UNIQUE.fullmatch(name) else part.path), part)
    return list(found.values())


def read_parts(
    named: Sequence[Path],
    columns: Collection[str] = SCHEMA.names,
    where: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    cases: Collection[str | None] = (),
    limits: ReadLimits | None = None,
) -> tuple[list[RowsFile], list[str], bool]:
    """All parts below some paths, what could not be read, and whether a file was gone when its turn came.

    Args:
        named: files and folders.
        columns: to decode.
        where: rows that may be left out, see `_may_fit`.
        cases: ids of cases whose rows are kept all the same.
        limits: what all of them may take.
    """
    parts, problems, vanished, limits = [], [], False, limits or ReadLimits.of(None)
    for path in {os.path.realpath(file): file for p in named for file in _files(p)}.values():
        try:
            part = read_part(path, columns, where, cases, limits)
        except (OSError, pa.ArrowException, ValueError) as error:
            vanished |= isinstance(error, FileNotFoundError)
            problems.append(f"{path}: {' '.join(str(error).split()) or type(error).__name__}")
        else:
            parts.append(part)
            problems += [f"{path}: {part.problem}"] * bool(part.problem)
    return parts, problems, vanished


def read_part(
    path: Path,
    columns: Collection[str] = SCHEMA.names,
    where: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    cases: Collection[str | None] = (),
    limits: ReadLimits | None = None,
) -> RowsFile:
    """The rows of one file, with the given columns.

    Raises:
        ValueError: the file holds no rows of this store, those of another schema_version, or more than there is room for.
    """
    limits = limits or ReadLimits.of(None)
    content = pa.BufferReader(read_bytes(path, limits.most))
    metadata = parquet.read_metadata(content)
    present = metadata.schema.to_arrow_schema()
    if "schema_version" not in present.names:
        raise ValueError(f"has no rows of this store (columns:  {', '.join(present.names[:5])})")
    pushed = {name: values for name, values in where.items() if name in _PUSHED and None not in values}
    needed = {*columns, "schema_version", *pushed, *(["case_id"] if pushed and cases else [])}
    if absent := sorted(name for name in needed if present.names.count(name) != 1):
        raise ValueError(f"lacks columns of this store, or has them twice: {', '.join(absent)}")
    limits.check(_decoded(metadata, needed))
    replaces = from_json((present.metadata or {}).get(REPLACES, b"[]"))
    if not (isinstance(replaces, list) and all(isinstance(name, str) for name in replaces)):
        raise ValueError("its metadata does not list the parts that it replaces")
    texts = [name for name in TEXTS if name in needed]
    file = parquet.ParquetFile(content, metadata=metadata, read_dictionary=texts)
    rows = encoded(file.read(columns=sorted(needed), use_threads=False), needed)
    for version in rows["schema_version"].unique().to_pylist():
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"holds rows of schema_version {version}, this harness reads {SCHEMA_VERSION}: measure again, or read it with "
                "the commit that wrote it (git_commit in the rows' env)"
            )
    rows = _may_fit(rows, pushed, cases).select([name for name in SCHEMA.names if name in columns])
    problem = ""
    if wrong := faults(rows):
        first = wrong[min(wrong)]
        problem = f"left out {len(wrong)} of {len(rows)} rows, which no harness writes: {first}"
        rows = rows.filter(pa.array(np.isin(np.arange(len(rows)), [*wrong], invert=True)))
    limits.check(sum(_size(rows[name]) for name in rows.column_names if name in TEXTS))
    rows = in_memory(rows)
    limits.taken += rows.nbytes
    return RowsFile(path, rows, tuple(replaces), problem)


def _decoded(metadata: parquet.FileMetaData, columns: Collection[str]) -> int:
    """Bytes that some columns of a file take when they are decoded, texts as dictionaries.

    Raises:
        ValueError: a column of a type or an encoding that the store has not, whose size is not known.
    """
    size = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            name = chunk.path_in_schema.partition(".")[0]
            if name not in columns:
                continue
            is_text = name in TEXTS and chunk.path_in_schema == name
            if (chunk.physical_type == "BYTE_ARRAY") != is_text or chunk.physical_type.startswith("FIXED"):
                raise ValueError(f"its column {name} is no {SCHEMA.field(name).type}")
            if is_text and not {*chunk.encodings} <= _ENCODINGS:
                raise ValueError(f"its column {name} has an encoding that is not read: {chunk.encodings}")
            size += chunk.num_values * 8 + chunk.total_uncompressed_size * is_text
    return size


def _size(column: pa.ChunkedArray) -> int:
    """Bytes of the texts of a column once each row has its own."""
    lengths = (compute.binary_length(each.dictionary).take(each.indices) for each in column.chunks)
    return sum(int(compute.sum(each).as_py() or 0) for each in lengths)


def _may_fit(table: pa.Table, pushed: Mapping[str, Sequence[Any]], cases: Collection[str | None]) -> pa.Table:
    """The rows that may be asked for, by columns that are equal in all attempts of a case, and by metric."""
    if not pushed:
        return table
    mask = reduce(compute.and_, (is_in(table, name, values) for name, values in pushed.items()))
    if cases:
        mask = compute.or_(mask, is_in(table, "case_id", cases))
    return table.filter(mask)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    if os.path.lexists(path):  # a link that leads nowhere is a bad file among good ones
        return [path]
    raise UsageError(f"no such file or folder: {path}")


def _together(parts: Sequence[RowsFile], columns: Collection[str]) -> pa.Table:
    none = in_memory(encoded(SCHEMA.empty_table(), columns))
    return pa.concat_tables([none, *(part.rows for part in parts)]).unify_dictionaries()


def _contested(table: pa.Table) -> set[str | None]:
    """The cases of which there are rows of more than one attempt."""
    ends = table.group_by(["run_id", "case_id"]).aggregate([("attempt", "min"), ("attempt", "max")])
    several = compute.not_equal(ends["attempt_min"], ends["attempt_max"])
    return set(ends.filter(several)["case_id"].to_pylist())


def _last_attempts(table: pa.Table, contested: Collection[str | None]) -> pa.Table:
    """The rows of attempts that count, of the cases that have several; all rows of the others."""
    several = is_in(table, "case_id", contested).to_numpy(zero_copy_only=False)
    stands = np.ones(len(table), bool)
    stands[several] = that_count(table.filter(several).select(DECIDED_BY).to_pandas()).to_numpy()
    return table.filter(stands)


def _matching(table: pa.Table, where: Mapping[str, Sequence[Any]]) -> pa.Table:
    """The rows that have one of the values in each of the columns and axes."""
    for name, values in where.items():
        if name in SCHEMA.names:
            mask = is_in(table, name, values)
        else:
            texts = _dictionary(table["axes"])
            cases = [parse(text) for text in texts]
            axis = name.removeprefix("axes.")
            if len(table) and not any(axis in axes for axes in cases):
                raise unknown(
                    "column or axis", name, {*SCHEMA.names, *(key for axes in cases for key in axes)}
                )
            fit = [text for text, axes in zip(texts, cases, strict=True) if _has(axes.get(axis), values)]
            mask = is_in(table, "axes", fit)
        table = table.filter(mask)
    return table


def _has(value: object, values: Sequence[object]) -> bool:
    # True is no 1 here: an axis that is a flag is none that counts.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def _frame(table: pa.Table) -> pd.DataFrame:
    """The rows in pandas. Long texts are objects of which equal ones are one object: 8 bytes a row."""
    import pandas as pd

    long = [name for name in table.column_names if name in JSON_COLUMNS]
    texts = {name: _texts(table[name]) for name in long}
    frame = table.drop_columns(long).to_pandas()
    # As they are: pandas would copy a text for each row.
    shared = {name: pd.Series(column, frame.index, dtype=object) for name, column in texts.items()}
    return frame.assign(**shared)[table.column_names]


def _dictionary(column: pa.ChunkedArray) -> list[str]:
    """The distinct texts of a column of `JSON_COLUMNS`."""
    return list(dict.fromkeys(text for chunk in column.chunks for text in chunk.dictionary.to_pylist()))


def _texts(column: pa.ChunkedArray) -> NDArray[np.object_]:
    parts = [np.empty(0, dtype=object)]
    for chunk in column.chunks:
        texts = np.array([*chunk.dictionary.to_pylist(), None], dtype=object)
        parts.append(texts[compute.fill_null(chunk.indices, len(texts) - 1).to_numpy(zero_copy_only=False)])
    return np.concatenate(parts)


def _axes(frame: pd.DataFrame) -> dict[str, Any]:
    """A column for each axis of the cases."""
    cases = [parse(text) for text in frame["axes"]]
    names = dict.fromkeys(name for axes in cases for name in axes)
    taken = {*SCHEMA.names, "case_axes"}
    return {f"axes.{name}" if name in taken else name: [axes.get(name) for axes in cases] for name in names}
