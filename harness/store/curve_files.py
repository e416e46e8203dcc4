"""Curve files: the loss curves that others' programs wrote, each as a tidy frame of runs.

One file is one run unless it has a column `run`, is W&B's export with a column a run, or an MLPerf log with several. A reader
gives the table as it is written, indexed by line; `tidy` picks its columns. A cell that is empty is a row without that figure,
as in Lightning's files; NaN and infinity that were written stay. Text logs are read by the table of `curve_logs`.
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

from harness.store.curve_logs import MOST_COLUMNS, as_written, read_log, short_of
from harness.store.errors import UsageError
from harness.store.outside import from_json, read_text
from harness.store.text import printable, short, some

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from harness.store.stats import Vector

    Mask = NDArray[np.bool_]

VALUES = (
    *("val_loss", "eval_loss", "eval/loss", "val/loss", "validation_loss", "valid_loss", "validation/loss"),
    *("eval_accuracy", "val_bpb", "val/bpb", "value", "Value"),
    *("train_loss", "train/loss", "loss", "lm_loss", "lm loss"),
)  # where none is asked for: losses of validation first
STEPS = (
    *("step", "_step", "global_step", "trainer/global_step", "train/global_step", "Step"),
    *("iter", "iteration", "current_steps", "samples", "epoch"),
)
CLOCKS = {
    **dict.fromkeys(("time_s", "elapsed_s", "seconds", "_runtime", "elapsed_time"), 1.0),
    **dict.fromkeys(("train_time_ms", "time_ms"), 1e-3),
    **dict.fromkeys(("wall_time", "Wall time", "_timestamp", "timestamp"), 1.0),
}  # of a column's unit, in seconds; "0:01:02" and dates are read too
WALL = 1e8  # seconds: so late is no time since a start, and a thousand times that is in ms
ROWS_PER_RESTART = 20  # at least: runs that share a file go back more often
NOT_FINITE = ("nan", "+nan", "-nan")  # others are read as numbers
STORED = {"run_id", "case_id", "arm", "metric"}  # columns of rows of this store, as `export` writes them


def read_all(patterns: Sequence[str], side: str, format: str = "") -> list[pd.DataFrame]:
    """Read every run that the patterns match: GLOB, or GLOB:RUNS for the runs whose names match.

    A folder is a run where it holds one run's event files, MLflow metrics, or `trainer_state.json`, of which the last
    checkpoint's counts. Files of one such folder are one run too.

    Raises:
        UsageError: a pattern matches no file, or a file cannot be read.
    """
    tables = []
    for pattern in patterns:
        path, runs = pattern, "*"
        if not (paths := _matches(path)) and ":" in pattern:
            path, _, runs = pattern.rpartition(":")
            paths = _matches(path)
        if not paths:
            raise UsageError(f"{side}={printable(pattern)} matches no file")
        files = [each for each in paths if each.is_file()]
        parts: dict[Path, list[Path]] = {}
        for each in files or paths:
            parts.setdefault(_run_of(each), []).append(each)
        for run in parts:
            table = _read(parts[run] if files else _parts(run), run, format)
            table.attrs["runs"] = runs
            tables.append(table)
        if files and len(files) < len(paths):
            tables[-1].attrs["notes"].append(
                f"{printable(pattern)}: {len(paths) - len(files)} folders are not read"
            )
    return tables


def _matches(pattern: str) -> list[Path]:
    found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return [Path(each) for each in found]


def _run_of(path: Path) -> Path:
    """Return the folder that this file makes a run, or the path itself."""
    is_checkpoint = path.name == "trainer_state.json" and path.parent.name.startswith("checkpoint-")
    return path.parent.parent if is_checkpoint else path.parent if "tfevents" in path.name else path


def _parts(folder: Path) -> list[Path]:
    """Return the files of a folder that is one run.

    Raises:
        UsageError: the folder is not one run.
    """
    metrics = "metrics/**/*" if (folder / "meta.yaml").exists() else "no metrics"  # of MLflow
    for pattern in ("*tfevents*", "trainer_state.json", "checkpoint-*/trainer_state.json", metrics):
        if files := sorted(each for each in folder.glob(pattern) if each.is_file()):
            return files
    raise UsageError(
        f"{printable(str(folder))} is a directory, and not of one run (event files, trainer_state.json, MLflow's metrics): "
        "name its files, as in DIR/*.csv"
    )


def read(path: Path, format: str = "") -> pd.DataFrame:
    """Read a file as it is written, or the folder of a run.

    Args:
        path: the file, or folder.
        format: a name of `READERS` or of `curve_logs.FORMATS`, or a regular expression with the groups `step` and `value`, and
            `time_s` or `time_ms` where it has times; "": by the file's name, and of a text log by its lines.

    Returns:
        The table. `attrs`: `source`, its name; `notes`, what was read in which way and what was not; `unfinished`, {run: why},
            by the marks of the format, where the run of a file without a column `run` is "".

    Raises:
        UsageError: what cannot be read, by file and line.
    """
    return _read(_parts(path) if path.is_dir() else [path], path, format)


def _read(parts: Sequence[Path], run: Path, format: str) -> pd.DataFrame:
    source, name = printable(str(run)), parts[0].name
    reader = READERS.get(format or ("tfevents" if "tfevents" in name else parts[0].suffix.lower()[1:]))
    try:
        if reader:
            table = reader(parts)
        elif run.is_dir():
            table = _mlflow(parts, run)
        else:
            table = read_log(read_text(run, "replace"), format)
    except ModuleNotFoundError as error:
        raise UsageError(f"{source}: this needs {error.name}: pip install {error.name}") from error
    except (OSError, ValueError) as error:  # of pandas, pyarrow and JSON too
        raise UsageError(f"{source}: {short(str(error), 500)}") from error
    notes = [short(f"{source}: {note}", 500) for note in table.attrs.get("notes", ())]
    unfinished = {run: why for run, why in table.attrs.get("unfinished", {}).items() if why}
    about: Any = table.attrs | {"source": source, "notes": notes, "unfinished": unfinished}
    keys = table["key"].unique() if {"key", "value"} <= set(table) else ()
    if 0 < len(keys) < MOST_COLUMNS:  # MLflow's history
        by_key = {str(key): table["value"].where(table["key"] == key) for key in keys}
        table = pd.DataFrame({**table.drop(columns=["key", "value"]), **by_key})
    table.attrs = about
    return table


def _csv(paths: Sequence[Path]) -> pd.DataFrame:
    text = io.StringIO(read_text(paths[0]))
    table = pd.read_csv(text, dtype=str, keep_default_na=False, na_values=[""], skip_blank_lines=False)
    return table.set_axis(pd.RangeIndex(2, len(table) + 2, name="line"))


def _jsonl(paths: Sequence[Path]) -> pd.DataFrame:
    """Read objects, one a line. Of a cut last line only whole numbers are read. LLaMA-Factory logs the planned steps."""
    text = read_text(paths[0])
    lines = {i: line for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    unfinished: dict[str, str] = {}
    try:  # all at once takes a fifth of the time
        records = from_json(f"[{','.join(lines.values())}]")
    except ValueError:
        records = []
    if len(records) != len(lines):
        records = []
        for i, line in lines.items():
            try:
                records.append(from_json(line))
            except ValueError as error:
                if text.endswith("\n") or not records or len(records) < len(lines) - 1:
                    raise ValueError(f"line {i}: {error}") from error
                unfinished[""] = f"line {i} is cut"
                records.append(dict(re.findall(r'"([\w/]+)": ?(\d+),', line)))
    table = as_written(records).set_axis(pd.Index([*lines], name="line"))
    table.attrs = {"unfinished": unfinished, "has_gaps": bool(unfinished)}
    if {"current_steps", "total_steps"} <= set(table):
        unfinished.setdefault("", short_of(table["current_steps"], table["total_steps"]))
    return table


def _json(paths: Sequence[Path]) -> pd.DataFrame:
    """Read a list of objects, the last of several trainer_state.json files, or TensorBoard's list of lists."""
    path = max(paths, key=lambda each: [int(n) for n in re.findall(r"\d+", each.parent.name)])
    document = from_json(read_text(path))
    if not isinstance(document, dict):
        names = "wall_time", "step", "value"
        lists = document if isinstance(document, list) else [document]
        return as_written([dict(zip(names, x, strict=False)) if isinstance(x, list) else x for x in lists])
    table = as_written(document.get("log_history", document.get("metrics")))
    notes = [f"{path.parent.name} is the last of {len(paths)}"] * (len(paths) > 1)
    if {"train_runtime", "train_loss", "loss"} <= set(table):
        table = table.rename(columns={"train_loss": "mean_train_loss"})  # the last record's, of all steps
    if {"grad_norm", "loss"} <= set(table):
        filtered = table["grad_norm"].eq("nan") & table["loss"].eq(
            0
        )  # the Trainer writes 0 for a loss of NaN
        table.loc[filtered, "loss"] = "nan"
        if filtered.any():
            steps = some([f"{step}" for step in table.loc[filtered].get("step", ())], 3, ", ")
            notes.append(f"a loss of 0 beside a grad_norm of NaN is read as NaN: step {steps}")
    table.attrs["notes"] = notes
    done, planned = (document.get(name) for name in ("global_step", "max_steps"))
    if isinstance(done, int) and isinstance(planned, int) and done < planned:
        table.attrs["unfinished"] = {"": f"step {done} of {planned}"}
    return table


def _tensorboard(paths: Sequence[Path]) -> pd.DataFrame:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    rows: dict[tuple[int, float], dict[str, Any]] = {}
    others = set()
    for event in (event for path in paths for event in EventFileLoader(str(path)).Load()):
        for each in event.summary.value:
            figure = make_ndarray(each.tensor) if each.HasField("tensor") else np.zeros(0)
            if figure.size == 1 and figure.dtype.kind == "f":
                row = rows.setdefault((event.step, event.wall_time), {})
                row |= {"step": event.step, "wall_time": event.wall_time, each.tag: float(figure.item())}
            else:
                others.add(each.tag)
    table = as_written([*rows.values()])
    if others:
        table.attrs["notes"] = [f"tags without a figure, not read: {some(sorted(others))}"]
    return table


def _mlflow(paths: Sequence[Path], run: Path) -> pd.DataFrame:
    """Read the metric files of one MLflow run."""
    tables = []
    for path in paths:
        name = path.relative_to(run / "metrics").as_posix()
        tables.append(read_log(read_text(path), "mlflow").rename(columns={"value": name}))
    return pd.concat(tables, ignore_index=True)


READERS: Mapping[str, Callable[[Sequence[Path]], pd.DataFrame]] = {
    "csv": _csv,
    "jsonl": _jsonl,
    "json": _json,
    "parquet": lambda paths: pd.read_parquet(paths[0]),
    "tfevents": _tensorboard,
}


def tidy(table: pd.DataFrame, source: str = "", value: str = "", step: str = "") -> pd.DataFrame:
    """Pick the rows of a table that hold the loss: run, step, value, and time_s where the table has a clock.

    Other columns stay as they are. After a restart the later row of a step counts, and earlier rows from there on are dropped.

    Args:
        table: as written, or anyone's.
        source: its name, where `attrs` has none.
        value: the column of the loss; "": the first of `VALUES`.
        step: the column of the steps; "": the first of `STEPS`, or of W&B's export the first column.

    Returns:
        The rows. `attrs`: `source`; `value` and `step`, the names of the columns; `last`, {run: last step that any row has};
            `notes`, what was read in which way and what was not; `unfinished`, {run: why}, by the marks of the format.

    Raises:
        UsageError: a column is missing, a cell is no number, or the steps of a run go back too often for restarts.
    """
    about = table.attrs
    source, runs, notes = about.get("source", source), about.get("runs", "*"), [*about.get("notes", ())]
    table = table.rename(columns=str)
    if set(table) >= STORED:
        run = printable(str(table["run_id"].iloc[0])) if len(table) else "RUN"
        raise UsageError(
            f"{source}: rows of a stored run, whose arms are judged seed by seed with their controls and proofs, which this table "
            f"does not hold: python -m harness report {run}"
        )
    metric, wide = _runs_by_column(table, [value] if value else VALUES, source, notes)
    at = _column(table, step, [table.columns[0]] if wide else STEPS, "step", source)
    if wide:
        if at in wide:
            raise UsageError(
                f"{source}: step={printable(at)} is a run's loss: name the column of the steps, as {printable(table.columns[0])}"
            )
        value = metric
        table = table[[at, *wide]].rename(columns=wide)
        table = table.melt(at, var_name="run", value_name=value, ignore_index=False)
    value = _column(table, value, VALUES, "value", source)
    clock = next((name for name in CLOCKS if name in table and name != at), "")
    made = table.drop(columns=[at, value, *([clock] if clock else [])])
    made["run"] = run_names(table, source)
    made["step"] = _numbers(table, at, source)[0]
    made["value"], empty = _numbers(table, value, source)
    chosen = [run for run in made["run"].unique() if fnmatch.fnmatchcase(run, runs)]
    if len(chosen) < (every := made["run"].nunique()):
        notes.append(f"{source}: {len(chosen)} of {every} runs are read")
    if not chosen:
        known = some([short(run, 60) for run in made["run"].unique()], 12, ", ")
        raise UsageError(f"{source}: no run is {printable(runs)}; it has {known}")
    if clock:
        seconds = _seconds(table, clock, source)
        if (seconds > WALL).any():
            seconds = seconds - pd.Series(seconds).groupby(made["run"].to_numpy()).transform("min").to_numpy()
        made["time_s"] = seconds
    if (
        not wide
        and not about.get("has_gaps")
        and set(made) <= {"arm", "run", "seed", "step", "value", "time_s"}
    ):
        empty &= False  # a row with nothing beside its step is there for its loss, which was no number
    there = made["step"].where(~empty) if wide else made["step"]
    last = there.groupby(made["run"], sort=False).max().to_dict()
    made = made[~empty & made["run"].isin(chosen)]
    if not len(made):
        raise UsageError(f"{source}: no row has a {printable(value)}")
    if (wrong := ~(made["step"].abs() < 1e15)).any():
        raise UsageError(f"{source}, {_place(made, wrong)}: {printable(at)} is no step")
    unfinished = {run or source: why for run, why in about.get("unfinished", {}).items()}
    made = _continued(made, source, notes, unfinished)
    if clock and (back := made.groupby("run")["time_s"].diff() < 0).any():
        made = made.assign(time_s=made["time_s"].mask(made["run"].isin(made["run"][back])))
        notes.append(f"{source}, {_place(made, back)}: {printable(clock)} goes back: this run has no times")
    made.attrs = {"source": source, "value": value, "step": at, "last": last, "notes": notes}
    made.attrs["unfinished"] = {run: why for run, why in unfinished.items() if run in chosen}
    return made


def run_names(table: pd.DataFrame, source: str) -> pd.Series[str]:
    """Return of each row the run that it is of: its columns `arm` and `run`, else the file."""
    names = [table[name].astype(str).fillna("") for name in ("arm", "run") if name in table]
    return functools.reduce(lambda a, b: a + "/" + b, names) if names else pd.Series(source, table.index)


def _runs_by_column(
    table: pd.DataFrame, values: Sequence[str], source: str, notes: list[str]
) -> tuple[str, dict[str, str]]:
    """Return the value's name and {column: run} of a W&B export, which has a column a run; "" and {} for other tables."""
    for value in values:
        runs = {}
        for column in table.columns[1:].astype(str):
            if match := re.fullmatch(rf"(.*) - {re.escape(value)}(?:\.(\d+))?", column):
                number = f" ({match[2]})" if match[2] else ""  # by pandas, for runs of one name
                runs[column] = match[1] + number
                low, high = (column.replace(f" - {value}", f" - {value}__{end}") for end in ("MIN", "MAX"))
                if {low, high} <= set(table) and not table[low].equals(table[high]):
                    notes.append(f"{source}: {printable(match[1])} is a mean, of a group of runs or of steps")
        if runs:
            return value, runs
    return "", {}


def _continued(made: pd.DataFrame, source: str, notes: list[str], unfinished: dict[str, str]) -> pd.DataFrame:
    """Drop the rows that a later row of their run repeats or overwrites; a row overwrites those at its step and beyond."""
    for keep in ("first", "last"):  # ranks that lag, or a restart that met the same losses
        rows = made[~made.duplicated(["run", "step", "value"], keep=keep)]
        runs, steps = rows["run"].to_numpy(), rows["step"].to_numpy()
        back = (rows["step"] <= rows["step"].groupby(runs).shift()).to_numpy()
        if not back.any():
            return rows
    later = rows["step"][::-1].groupby(runs[::-1]).cummin()[::-1].groupby(runs).shift(-1)
    kept = ~(later <= rows["step"]).to_numpy()
    for run in np.unique(runs[back]):
        mine = runs == run
        if (returns := (back & mine).sum()) > 2 + (kept & mine).sum() // ROWS_PER_RESTART:
            raise UsageError(
                f"{source}, {_place(rows, back & mine)}: the steps do not increase, they go back {returns} times: one file is "
                "one run unless it has a column `run`; write a file a run, or name the runs in that column"
            )
        lost = steps[mine & ~kept]
        if not np.isfinite(rows["value"].to_numpy(float)[mine & ~kept]).all():
            unfinished.setdefault(run, "before a restart its loss was not finite")
        name = source if run == source else f"{source}, run {printable(run)}"
        notes.append(f"{name}: step {lost.min():g} to {lost.max():g} written twice, the later rows count")
        if steps[mine][-1] < lost.max():
            unfinished.setdefault(
                run, f"after a restart it ends before step {lost.max():g}, which it had reached"
            )
    return rows[kept]


def _seconds(table: pd.DataFrame, name: str, source: str) -> Vector:
    """Return a clock in seconds, from numbers, times such as "0:01:02" or dates; NaN for anything else."""
    try:
        seconds = np.multiply(_numbers(table, name, source)[0], CLOCKS[name], dtype=np.float64)
    except UsageError:
        text = table[name].astype(str)
        if text.str.contains("-").any():
            dates = pd.to_datetime(text, errors="coerce", utc=True, format="ISO8601")
            times = dates - pd.Timestamp("1970-01-01", tz="UTC")
        else:
            times = pd.to_timedelta(text, errors="coerce")
        seconds = times.dt.total_seconds().to_numpy(np.float64)
    return seconds / 1000 if (seconds > 1000 * WALL).any() else seconds


def _column(table: pd.DataFrame, asked: str, usual: Sequence[str], what: str, source: str) -> str:
    """The column that is asked for, or the first usual one."""
    found = asked if asked in table else next((name for name in usual if name in table and not asked), "")
    if list(table).count(found) != 1:
        columns = some([short(str(name), 60) for name in table], 12, ", ")
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
