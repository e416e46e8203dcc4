"""Curve files: the loss curves that others' programs wrote, each as a tidy frame of runs.

One file is one run unless it has a column `run`, or is W&B's export with a column a run. A reader gives the table as it is
written, indexed by line; `tidy` picks its columns. A cell that is empty is a row without that figure, as in Lightning's
files; NaN and infinity that were written stay.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.store.errors import UsageError
from harness.store.outside import from_json, read_text
from harness.store.text import printable, short, some

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from harness.store.stats import Vector

    Mask = NDArray[np.bool_]

VALUES = (
    "val_loss",
    "eval_loss",
    "eval/loss",
    "val/loss",
    "validation_loss",
    "value",
)  # where none is asked for
STEPS = ("step", "_step", "global_step", "Step", "iter", "iteration")
SECONDS = {
    "time_s": 1.0,
    "elapsed_s": 1.0,
    "_runtime": 1.0,
    "train_time_ms": 1e-3,
    "time_ms": 1e-3,
}  # of a column's unit
PATTERNS = {
    "modded_nanogpt": r"step:(?P<step>\d+)/\d+ val_loss:(?P<value>\S+) train_time:(?P<time_ms>\d+)ms",
    "nanogpt": r"step (?P<step>\d+): train loss \S+, val loss (?P<value>\S+)",
}
NOT_FINITE = ("nan", "+nan", "-nan")  # others are read as numbers


def read_all(patterns: Sequence[str], side: str, format: str = "") -> list[pd.DataFrame]:
    """The table of every file that patterns match: GLOB, or GLOB:RUNS for those runs whose names match.

    Raises:
        UsageError: a pattern matches no file, or a file cannot be read.
    """
    tables = []
    for pattern in patterns:
        path, runs = pattern, "*"
        if not (paths := _matches(path)) and ":" in pattern:
            path, _, runs = pattern.rpartition(":")
            paths = _matches(path)
        files = [each for each in paths if each.is_file()]
        if not files:
            what = "is a directory: name its files, as in DIR/*.csv" if paths else "matches no file"
            raise UsageError(f"{side}={printable(pattern)} {what}")
        for table in (read(file, format) for file in files):
            table.attrs["runs"] = runs
            tables.append(table)
    return tables


def _matches(pattern: str) -> list[Path]:
    found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return [Path(each) for each in found]


def read(path: Path, format: str = "") -> pd.DataFrame:
    """A file as it is written, `attrs["source"]` its name.

    Args:
        path: the file.
        format: how a text log is read: a name of `PATTERNS`, or a regular expression with the groups `step` and `value`, and
            `time_s` or `time_ms` where it has times.

    Raises:
        UsageError: what cannot be read, by file and line.
    """
    source = printable(str(path))
    reader = READERS.get("tfevents" if "tfevents" in path.name else path.suffix.lower())
    if format:
        reader = functools.partial(_text, pattern=_pattern(format))
    if reader is None:
        raise UsageError(
            f"{source}: expected {', '.join(READERS)}; a text log needs format={'|'.join(PATTERNS)}|REGEX"
        )
    try:
        table = reader(path)
    except ModuleNotFoundError as error:
        raise UsageError(f"{source}: this needs {error.name}: pip install {error.name}") from error
    except (OSError, ValueError) as error:  # of pandas, pyarrow and JSON too
        raise UsageError(f"{source}: {short(str(error), 300)}") from error
    table.attrs["source"] = source
    return table


def _csv(path: Path) -> pd.DataFrame:
    text = io.StringIO(read_text(path))
    table = pd.read_csv(text, dtype=str, keep_default_na=False, na_values=[""], skip_blank_lines=False)
    return table.set_axis(pd.RangeIndex(2, len(table) + 2, name="line"))


def _jsonl(path: Path) -> pd.DataFrame:
    lines = {i: line for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()}
    try:  # all at once takes a fifth of the time
        records = from_json(f"[{','.join(lines.values())}]")
    except ValueError:
        records = []
    if len(records) != len(lines):
        records = [_object(line, i) for i, line in lines.items()]
    return _records(records).set_axis(pd.Index([*lines], name="line"))


def _object(line: str, i: int) -> Any:
    try:
        return from_json(line)
    except ValueError as error:
        raise ValueError(f"line {i}: {error}") from error


def _json(path: Path) -> pd.DataFrame:
    document = from_json(read_text(path))
    return _records(document.get("log_history") if isinstance(document, dict) else document)


def _records(records: Any) -> pd.DataFrame:
    """A row a record; NaN that was written as a text, so that it is not taken for a key that is missing."""
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise ValueError(
            "expected objects: one a line, or a list, as log_history of Hugging Face's trainer_state.json"
        )
    written = [{key: "nan" if cell != cell else cell for key, cell in record.items()} for record in records]
    return pd.DataFrame(written, dtype=object)


def _tensorboard(path: Path) -> pd.DataFrame:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    rows: dict[tuple[int, float], dict[str, Any]] = {}
    start = None
    for event in EventFileLoader(str(path)).Load():
        start = event.wall_time if start is None else start
        for each in event.summary.value:
            figures = make_ndarray(each.tensor) if each.HasField("tensor") else np.zeros(0)
            if figures.size == 1 and figures.dtype.kind == "f":
                row = {"step": event.step, "time_s": event.wall_time - start, each.tag: float(figures.item())}
                rows[event.step, event.wall_time] = rows.get((event.step, event.wall_time), {}) | row
    return _records([*rows.values()])


def _pattern(format: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(PATTERNS.get(format, format))
    except re.error:
        pattern = re.compile("")
    if not {"step", "value"} <= pattern.groupindex.keys():
        names = ", ".join(PATTERNS)
        raise UsageError(
            f"format={printable(format)}: expected {names}, or a regular expression with (?P<step>...) and (?P<value>...)"
        )
    return pattern


def _text(path: Path, pattern: re.Pattern[str]) -> pd.DataFrame:
    found = {i: pattern.search(line) for i, line in enumerate(read_text(path).splitlines(), 1)}
    lines = {i: match.groupdict() for i, match in found.items() if match}
    if not lines:
        raise ValueError(f"no line matches format={pattern.pattern}")
    return pd.DataFrame([*lines.values()], dtype=object).set_axis(pd.Index([*lines], name="line"))


READERS: Mapping[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": pd.read_parquet,
    "tfevents": _tensorboard,
}


def tidy(table: pd.DataFrame, source: str = "", value: str = "", step: str = "") -> pd.DataFrame:
    """The rows of a table that hold the loss: run, step, value, and time_s where the table has a clock.

    Other columns stay as they are. `attrs`: `source`; `value` and `step`, the names of the columns; `last`, of each run the
    last step that any row has.

    Args:
        table: as written, or anyone's.
        source: its name, where `attrs` has none.
        value: the column of the loss; "": the first of `VALUES`.
        step: the column of the steps; "": the first of `STEPS`.

    Raises:
        UsageError: a column is missing, a cell is no number, or the steps of a run do not increase.
    """
    source, runs = table.attrs.get("source", source), table.attrs.get("runs", "*")
    table = table.rename(columns=str)
    columns: list[str] = list(table.columns)
    at = _column(table, step, STEPS, "step", source)
    usual = [value] if value else VALUES
    wide = next(filter(None, ([c for c in columns if c.endswith(f" - {name}")] for name in usual)), [])
    if wide:  # W&B's export: a column a run, beside its __MIN and __MAX
        value = wide[0].rpartition(" - ")[2]
        table = table[[at, *wide]].rename(columns=lambda c: c.removesuffix(f" - {value}"))
        table = table.melt(at, var_name="run", value_name=value, ignore_index=False)
    value = _column(table, value, VALUES, "value", source)
    clock = next((name for name in SECONDS if name in table), "")
    made = table.drop(columns=[at, value, *([clock] if clock else [])])
    made["run"] = run_names(table, source)
    made["step"] = _numbers(table, at, source)[0]
    made["value"], empty = _numbers(table, value, source)
    chosen = [run for run in made["run"].unique() if fnmatch.fnmatchcase(run, runs)]
    if not chosen:
        known = some([*map(printable, made["run"].unique())], 12, ", ")
        raise UsageError(f"{source}: no run is {printable(runs)}; it has {known}")
    if clock:
        made["time_s"] = _numbers(table, clock, source)[0] * SECONDS[clock]
    if not wide and set(made) <= {"arm", "run", "seed", "step", "value", "time_s"}:
        empty &= False  # a row with nothing beside its step is there for its loss, which was no number
    there = made["step"].where(~empty) if wide else made["step"]
    last = there.groupby(made["run"], sort=False).max().to_dict()
    made = made[~empty & made["run"].isin(chosen)]
    if not len(made):
        raise UsageError(f"{source}: no row has a {printable(value)}")
    before = made.groupby("run", sort=False)[["step", "value"]].shift()
    twice = (made["step"] == before["step"]) & (
        (made["value"] == before["value"]) | made["value"].isna() & before["value"].isna()
    )
    made, before = made[~twice], before[~twice]
    for wrong, why in (
        (~(made["step"].abs() < 1e15), f"{printable(at)} is no step"),
        (
            made["step"] <= before["step"],
            "the steps do not increase: one file is one run unless it has a column `run`",
        ),
    ):
        if wrong.any():
            raise UsageError(f"{source}, {_place(made, wrong)}: {why}")
    made.attrs = {"source": source, "value": value, "step": at, "last": last}
    return made


def run_names(table: pd.DataFrame, source: str) -> pd.Series[str]:
    """Of each row the run that it is of: its columns `arm` and `run`, else the file."""
    names = [table[name].astype(str) for name in ("arm", "run") if name in table]
    return functools.reduce(lambda a, b: a + "/" + b, names) if names else pd.Series(source, table.index)


def _column(table: pd.DataFrame, asked: str, usual: Sequence[str], what: str, source: str) -> str:
    """The column that is asked for, or the first usual one."""
    found = asked if asked in table else next((name for name in usual if name in table and not asked), "")
    if list(table).count(found) != 1:
        columns = some([printable(str(name)) for name in table], 12, ", ")
        wanted = (
            f"no single column {printable(asked)}" if asked else f"no single column of {', '.join(usual)}"
        )
        raise UsageError(f"{source}: {wanted}; it has {columns}: name one by {what}=")
    return found


def _numbers(table: pd.DataFrame, name: str, source: str) -> tuple[Vector, Mask]:
    """A column as numbers, and where it is empty."""
    column = table[name]
    empty = column.isna().to_numpy(bool, copy=True)
    if column.dtype.kind in "iuf":
        return column.to_numpy(np.float64, na_value=np.nan), empty
    text = column.astype(str).str.strip()
    numbers = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    empty |= (text == "").to_numpy(bool)
    wrong = np.isnan(numbers) & ~empty
    wrong[wrong] = ~text[wrong].str.lower().isin(NOT_FINITE)
    if wrong.any():
        raise UsageError(
            f"{source}, {_place(table, wrong)}: {printable(name)}={short(text[wrong].iloc[0], 40)} is no number"
        )
    return numbers, empty


def _place(table: pd.DataFrame, where: Mask | pd.Series[bool]) -> str:
    return f"{table.index.name or 'row'} {table.index[np.flatnonzero(where)[0]]}"
