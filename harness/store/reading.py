"""Reading: the rows of runs as one frame, whole or a part of it.

Columns and rows that nobody asked for are not decoded. Which attempt of a case counts is decided over all rows of that
case, so the selection of rows never brings back an attempt that a later one replaced. JSON texts, which rows of a case
share, are held once each.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
import warnings
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.dataset as dataset
from pyarrow.fs import LocalFileSystem

from harness.store import case
from harness.store.errors import UsageError, unknown
from harness.store.measurement import SCHEMA_VERSION, TIMES, Better, Status
from harness.store.outside import from_json, parse

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    import pandas as pd
    from numpy.typing import NDArray


_NULLABLE = {"value", "bytes_moved"}  # where there is no number
# None: not known
_NUMBER, _OBJECT = (int, float, type(None)), (dict, type(None))
_RESOLVED = {
    **dict.fromkeys(("tokens_per_step", "parameters"), _NUMBER),
    **dict.fromkeys(("fp8_gemms", "fp8_gemms_expected"), (int,)),
    **dict.fromkeys(("flops_causal", "flops_recomputed", "memory", "lr_schedule", "advice"), _OBJECT),
}  # what is computed with
_LONGEST = 2**16  # characters of the axes of a case
_WORDS = {"status": get_args(Status), "better": get_args(Better)}


def refuse_unsound(table: pa.Table) -> None:
    """Checks rows, in the columns that they have.

    Raises:
        ValueError: rows that no harness writes; the first fault is named.
    """
    for fault in _faults(table):
        raise ValueError(f"holds rows that no harness writes: {fault}")


def _faults(table: pa.Table) -> Iterator[str]:
    for name in {*table.column_names} - _NULLABLE:
        if table[name].null_count:
            yield f"{name!r} is missing"
    for name, words in _WORDS.items():
        if name in table.column_names:
            yield from (f"{name} {w!r}" for w in table[name].unique().to_pylist() if w not in words)
    for name in JSON_COLUMNS:
        if name in table.column_names:
            texts = {text for chunk in table[name].chunks for text in chunk.dictionary.to_pylist()}
            yield from (
                f"{name!r}: {fault}" for text in sorted(texts) if (fault := _fault_of_text(name, text))
            )
    yield from _faults_of_samples(table)


def _fault_of_text(name: str, text: str) -> str:
    """What is wrong with a text of a JSON column; "" for nothing."""
    if name == "axes" and len(text) > _LONGEST:
        return f"a case in {len(text)} characters"
    try:
        given = parse(text)
        if name == "arm_fields":
            case.from_json(text)
    except ValueError as error:
        return str(error)
    for key, value in given.items():
        if (
            (name in ("axes", "env") and key != "isa" and isinstance(value, dict | list))
            or (name == "flops" and type(value) not in (int, float))
            or (name == "resolved" and not isinstance(value, _RESOLVED.get(key, object)))
        ):
            return f"{key} is {value!r:.60}"
    return ""


def _faults_of_samples(table: pa.Table) -> Iterator[str]:
    if "samples" not in table.column_names:
        return
    samples = table["samples"].combine_chunks()
    counts, drawn = compute.list_value_length(samples), samples.flatten()
    if drawn.null_count or compute.any(compute.is_nan(drawn)).as_py():
        yield "samples that are no number"
    for name in {"rounds", "sample_clock_mhz"} & {*table.column_names}:
        sizes = compute.list_value_length(table[name])
        if not compute.all(
            compute.or_(compute.equal(sizes, 0), compute.equal(sizes, counts)), min_count=0
        ).as_py():
            yield f"another number of {name} than of samples"
    if "status" in table.column_names:
        measured = compute.is_in(table["status"], pa.array(["ok", "partial"]))
        if not compute.all(compute.equal(measured, compute.greater(counts, 0)), min_count=0).as_py():
            yield "a status that contradicts its samples"
    if "value" in table.column_names:
        sizes, drawn = counts.to_numpy(), drawn.to_numpy()
        held = sizes > 0
        starts, values = (np.cumsum(sizes) - sizes)[held], table["value"].to_numpy()[held]
        inside = [
            least.reduceat(drawn, starts) if held.any() else values for least in (np.minimum, np.maximum)
        ]
        if not ((inside[0] <= values) & (values <= inside[1])).all():
            yield "a value that its samples do not have between them"


_DRAWN = (
    20  # low bits of an attempt's number that are drawn: two writers that begin within a millisecond differ
)


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


REPLACES = b"harness.replaces"  # metadata of a compacted file: the part names whose rows it holds
_UNIQUE = re.compile(r"(part|rows)-\d{20}-[0-9a-f]{6}\.parquet")  # a name that no two files have by chance
_OF_A_CASE = {"run_id", "sweep", "suite", "case_id", "seed"}  # equal in all rows of a case
_ATTEMPTS_OF_A_CASE = ("run_id", "case_id", "attempt")
_FORMAT = dataset.ParquetFileFormat(
    read_options=dataset.ParquetReadOptions(dictionary_columns=set(LONG_TEXTS))
)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a run."""

    path: Path
    rows: pa.Table
    replaces: tuple[str, ...]  # names of the parts whose rows it holds as well


def read(
    paths: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    where: Mapping[str, object] | None = None,
    all_attempts: bool = False,
    expand: bool = False,
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

    Returns:
        The columns of `SCHEMA`, and `case_axes`: the same text as `axes`, under a name that pandas has no other use for
        (`frame.axes` is pandas' own). `frame.attrs["problems"]` says of each file what could not be read and why; a
        warning says it too; columns that were not asked for are not looked at. `frame.attrs["files"]` are the files that
        were read.

    Raises:
        UsageError: a path does not exist, rows are of another schema_version than ours, a name is neither a column nor
            an axis of these runs, or `where` names a column of lists.
    """
    returned = _returned(columns)
    fitting = {name: _alternatives(name, value) for name, value in (where or {}).items()}
    of_rows = fitting.keys() & set(SCHEMA.names)
    needed = {*returned} - {"case_axes"} | of_rows
    if expand or "case_axes" in returned or fitting.keys() - of_rows:
        needed.add("axes")
    named = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    kept, table, problems = _rows(named, needed, fitting, all_attempts)
    for problem in problems:
        warnings.warn(f"skipped an unreadable file: {problem}", RuntimeWarning, stacklevel=2)
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
    named: Sequence[Path], needed: Collection[str], where: Mapping[str, list[Any]], all_attempts: bool
) -> tuple[list[Part], pa.Table, list[str]]:
    """The files that count, their rows that may be asked for, and what could not be read."""
    of_cases = {name: where[name] for name in where.keys() & _OF_A_CASE}
    # Cases with several attempts: all their rows are read, to decide which counts
    contested: set[str | None] = set()
    if not all_attempts and len(of_cases) < len(where):
        kept = each_once(read_parts(named, _ATTEMPTS_OF_A_CASE, _pushed(of_cases))[0])
        contested = _contested(_together(kept, _ATTEMPTS_OF_A_CASE))
    for attempt in range(4):
        decided_by = () if all_attempts else DECIDED_BY if contested or attempt else _ATTEMPTS_OF_A_CASE
        columns = {*needed, *decided_by}
        wanted = _pushed(where)
        if wanted is not None and contested:
            some = pa.array(sorted(filter(None, contested)), pa.string())
            wanted |= dataset.field("case_id").isin(some)
        parts, problems, vanished = read_parts(named, columns, wanted)
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


def _pushed(where: Mapping[str, Sequence[Any]]) -> dataset.Expression | None:
    """What Parquet itself can leave out: rows by columns that are equal in all attempts of a case, and by metric."""
    conditions = [
        dataset.field(name).isin(pa.array(values, SCHEMA.field(name).type))
        for name, values in where.items()
        if name in {*_OF_A_CASE, "metric"} and None not in values
    ]
    return reduce(lambda a, b: a & b, conditions) if conditions else None


def each_once(parts: Sequence[Part]) -> list[Part]:
    """The files without those whose rows another one holds: copies of it, and what it was compacted from."""
    replaced = {name for part in parts for name in part.replaces}
    found: dict[Hashable, Part] = {}
    for part in parts:
        name = part.path.name
        if name not in replaced:
            found.setdefault(part.replaces or (name if _UNIQUE.fullmatch(name) else part.path), part)
    return list(found.values())


def read_parts(
    named: Sequence[Path], columns: Collection[str] = SCHEMA.names, wanted: dataset.Expression | None = None
) -> tuple[list[Part], list[str], bool]:
    """All parts below some paths, what could not be read, and whether a file was gone when its turn came."""
    parts, problems, vanished = [], [], False
    for path in {os.path.realpath(file): file for p in named for file in _files(p)}.values():
        try:
            parts.append(read_part(path, columns, wanted))
        except UsageError:
            raise
        except (OSError, pa.ArrowException, ValueError) as error:
            vanished |= isinstance(error, FileNotFoundError)
            problems.append(f"{path}: {' '.join(str(error).split()) or type(error).__name__}")
    return parts, problems, vanished


def read_part(
    path: Path, columns: Collection[str] = SCHEMA.names, wanted: dataset.Expression | None = None
) -> Part:
    """The rows of one file, with the given columns.

    Raises:
        ValueError: the file holds no rows of this store, or rows that no harness writes (`harness.store.reading`).
        UsageError: its rows are of another schema_version.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is no file")
    # A fragment, no dataset: of a folder, one bad file would fail all.
    file = _FORMAT.make_fragment(str(path), LocalFileSystem())
    present = file.physical_schema
    if "schema_version" not in present.names:
        raise ValueError(f"has no rows of this store (columns:  {', '.join(present.names[:5])})")
    needed = {*columns, "schema_version"}
    stored = [name for name in present.names if name in needed]
    table = file.to_table(columns=stored, filter=wanted, use_threads=False)
    for version in table["schema_version"].unique().to_pylist():
        if version is None:
            raise ValueError("holds rows without their schema_version")
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"{path} holds rows of schema_version {version}, this harness reads {SCHEMA_VERSION}: measure again, or read "
                "it with the commit that wrote it (git_commit in the rows' env)"
            )
    if absent := sorted(needed - {*stored}):
        raise ValueError(f"lacks columns of this store: {', '.join(absent)}")
    replaces = from_json((present.metadata or {}).get(REPLACES, b"[]"))
    if not (isinstance(replaces, list) and all(isinstance(name, str) for name in replaces)):
        raise ValueError("its metadata does not list the parts that it replaces")
    rows = conform(table, columns)
    refuse_unsound(rows)
    return Part(path, rows, tuple(replaces))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    if os.path.lexists(path):  # a link that leads nowhere is a bad file among good ones
        return [path]
    raise UsageError(f"no such file or folder: {path}")


def _together(parts: Sequence[Part], columns: Collection[str]) -> pa.Table:
    none = conform(SCHEMA.empty_table(), columns)
    return pa.concat_tables([none, *(part.rows for part in parts)]).unify_dictionaries()


def _contested(table: pa.Table) -> set[str | None]:
    """The cases of which there are rows of more than one attempt."""
    ends = table.group_by(["run_id", "case_id"]).aggregate([("attempt", "min"), ("attempt", "max")])
    several = compute.not_equal(ends["attempt_min"], ends["attempt_max"])
    return set(ends.filter(several)["case_id"].to_pylist())


def _last_attempts(table: pa.Table, contested: Collection[str | None]) -> pa.Table:
    """The rows of attempts that count, of the cases that have several; all rows of the others."""
    several = compute.is_in(table["case_id"], pa.array(list(contested), pa.string())).to_numpy()
    stands = np.ones(len(table), bool)
    stands[several] = that_count(table.filter(several).select(DECIDED_BY).to_pandas()).to_numpy()
    return table.filter(stands)


def _matching(table: pa.Table, where: Mapping[str, Sequence[Any]]) -> pa.Table:
    """The rows that have one of the values in each of the columns and axes."""
    for name, values in where.items():
        if name in SCHEMA.names:
            mask = compute.is_in(table[name], pa.array(values, SCHEMA.field(name).type))
        else:
            texts = _dictionary(table["axes"])
            cases = [parse(text) for text in texts]
            axis = name.removeprefix("axes.")
            if len(table) and not any(axis in axes for axes in cases):
                raise unknown(
                    "column or axis", name, {*SCHEMA.names, *(key for axes in cases for key in axes)}
                )
            fit = [text for text, axes in zip(texts, cases, strict=True) if _has(axes.get(axis), values)]
            mask = compute.is_in(table["axes"].cast(pa.string()), pa.array(fit, pa.string()))
        table = table.filter(mask)
    return table


def _has(value: object, values: Sequence[object]) -> bool:
    # True is no 1 here: an axis that is a flag is none that counts.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def _frame(table: pa.Table) -> pd.DataFrame:
    """The rows in pandas. Long texts are objects of which equal ones are one object: 8 bytes a row."""
    import pandas as pd

    long = [name for name in table.column_names if name in LONG_TEXTS]
    texts = {name: _texts(table[name]) for name in long}
    frame = table.drop_columns(long).to_pandas()
    # As they are: pandas would copy a text for each row.
    shared = {name: pd.Series(column, frame.index, dtype=object) for name, column in texts.items()}
    return frame.assign(**shared)[table.column_names]


def _dictionary(column: pa.ChunkedArray) -> list[str]:
    """The distinct texts of a column of `LONG_TEXTS`."""
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


def read_quietly(
    source: str | Path | Sequence[str | Path],
    *,
    where: Mapping[str, object] | None = None,
    all_attempts: bool = False,
    expand: bool = False,
) -> tuple[pd.DataFrame, list[str]]:
    """`read` for a command line, which tells what could not be read in its own words and not as a Python warning.

    Returns:
        The rows, `attrs["problems"]` included, and what else would have been warned of.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = read(source, where=where, all_attempts=all_attempts, expand=expand)
    said = [str(w.message) for w in caught]
    return frame, [text for text in said if not any(problem in text for problem in frame.attrs["problems"])]
