"""Text logs: one table of the formats that training programs print, and the functions that read by it.

A format is how its lines begin, and the names that its figures get as columns. A figure is a name and a number, as in
`lm loss: 3.1E+00` or `norm 0.5`; its column is the name in lower case with underscores. Times of a line are seconds: `dt: 5ms`
becomes `dt_s`. A line's own date and time become the column `timestamp`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.store.errors import UsageError
from harness.store.outside import from_json
from harness.store.text import printable, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Heads = Mapping[str, Mapping[str, str]]

# Format -> how a line begins, with the groups `step` and `total_steps` -> its figures' columns.
# The first that a line matches counts. A line without `step` belongs to the last step before it.
FORMATS: Mapping[str, Heads] = {
    "mllog": {r":::MLLOG ": {}},
    "megatron": {
        r"iteration +(?P<step>\d+)/ *(?P<total_steps>\d+) \|": {
            "lm_loss": "train_loss",
            "learning_rate": "lr",
            "number_of_skipped_iterations": "skipped",
            "number_of_nan_iterations": "nan",
        },
        r"validation loss at iteration (?P<step>\d+)(?: on validation set)? \|": {
            "lm_loss_value": "val_loss",
            "lm_loss_ppl": "val_ppl",
        },
    },
    "torchtitan": {
        r"validate step: +(?P<step>\d+) +(?=loss:)": {"loss": "val_loss"},
        r"step: +(?P<step>\d+) +(?=loss:)": {"loss": "train_loss"},
    },
    "torchtune": {r"Step (?P<step>\d+) \| (?=\w+:\S)": {"loss": "train_loss"}},
    "nanochat": {
        r"Step (?P<step>\d+) \| (?=Validation )": {
            "validation_bpb": "val_bpb",
            "validation_loss": "val_loss",
        },
        r"step +(?P<step>\d+)(?:/(?P<total_steps>\d+))? (?:\(\S+\) )?\| (?=loss:)": {
            "loss": "train_loss",
            "norm": "grad_norm",
            "total_time_s": "time_s",
        },
    },
    "nanogpt": {
        r"step (?P<step>\d+): (?=train loss)": {},
        r"iter (?P<step>\d+): (?=loss)": {"time_s": "dt_s"},
    },
    "llmc": {
        r"step +(?P<step>\d+)/(?P<total_steps>\d+) \| (?=(?:train )?loss )": {
            "loss": "train_loss",
            "norm": "grad_norm",
        },
        r"^(?=val loss \S)": {},
        r"s:(?P<step>\d+) (?=t[er]l:|eval:)": {
            "tel": "val_loss",
            "trl": "train_loss",
            "norm": "grad_norm",
        },
    },
    "modded_nanogpt": {r"step:(?P<step>\d+)/(?P<total_steps>\d+) (?=\w+:)": {"train_time_s": "time_s"}},
    "mlflow": {r"^(?P<timestamp>\d{13}) (?P<value>\S+) (?P<step>\d+)\s*$": {}},
}
NUMBER = r"[-+]?(?:(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)"
LIKE_NUMBER = r"([-+\d.,eE]+|-?(?:nan|NaN|inf))"  # where one stood in the line before
FIGURE = re.compile(
    rf"(?<!\w)((?:[a-z_(][\w/()%.-]{{0,40}}(?: |(?=[:=]))){{1,8}})[:=]? {{0,20}}({NUMBER}) ?(ms|s|m)?(?![\w.])",
    re.IGNORECASE,
)
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}  # seconds
FIGURES_WITHIN = 4000  # characters of a line
MOST_COLUMNS = 200  # of figures by name, and as many constants of a run
MOST_SETTINGS = 50
ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")  # a terminal's colours
STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
# A setting that a program prints on a line of its own, as YAML or in Megatron's dotted list
SETTING = re.compile(
    r"\s*(?:\d+: *)?(fp[48]\w*|seed|global_batch_size)(?:: +| \.{2,} )(?!(?:int|str|bool)\s*$)([\w.+-]+)\s*$"
)
UNREAD = re.compile(r"loss[^|]{1,20}?\d", re.IGNORECASE)
SAMPLE = 50_000  # lines, by which a format is recognised
MLLOG_NAMES = {
    "submission_benchmark": "benchmark",
    "submission_org": "submitter",
    "submission_platform": "system",
    "reduced_train_loss": "train_loss",
    "eval_accuracy": "eval_loss",  # of a language model it is the loss; a rising one is refused by its shape
}
MLLOG_STEPS = "samples_count", "epoch_num", "step"  # in this order; a round has one or more of them


def read_log(text: str, format: str = "") -> pd.DataFrame:
    """Read a text log, a row for each line with figures, indexed by line; what a line lacks is empty.

    Settings that the log prints, such as `fp8: hybrid`, are columns with one value.

    Args:
        text: the log.
        format: a name of `FORMATS`, or a regular expression with the groups `step` and `value`, of which every group is a
            column; "": the format whose lines the log has.

    Returns:
        The table. `attrs`: `notes`, what was read and what was not; `unfinished`, {run: why}, where the run of a file without a
            column `run` is ""; `has_gaps`, as a line need not hold every figure.

    Raises:
        UsageError: `format` is neither a name nor such an expression.
        ValueError: no format fits, or two fit alike, or no line matches.
    """
    text = ESCAPE.sub("", text) if "\x1b" in text else text
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    notes: list[str] = []
    unfinished: dict[str, str] = {}
    heads = _heads(format or _recognised(lines, notes))
    if ":::MLLOG " in heads:
        table = _read_mllog(lines, notes, unfinished)
    else:
        table = _read_lines(lines, heads, notes, unfinished)
    table.attrs = {"notes": notes, "unfinished": unfinished, "has_gaps": True}
    return table


def _heads(format: str) -> Heads:
    try:
        groups = set(re.compile(format).groupindex)
    except re.error:
        groups = set()
    if format not in FORMATS and not {"step", "value"} <= groups:
        raise UsageError(
            f"format={printable(format)}: expected {', '.join(FORMATS)}, or a regular expression with (?P<step>...) and "
            "(?P<value>...)"
        )
    return FORMATS.get(format, {format: {}})


def _recognised(lines: Sequence[str], notes: list[str]) -> str:
    """Return the name of the format that most lines match; `mllog` where any line is of it."""
    counts, sample = Counter[str](), lines[:: max(1, len(lines) // SAMPLE)]
    for name, heads in FORMATS.items():
        for head in map(re.compile, heads):
            counts[name] += sum(head.search(line) is not None for line in sample)
    counts["mllog"] *= len(lines)
    (name, most), (other, second) = counts.most_common(2)
    if most == second:
        fits = f"its lines fit {name} and {other} alike" if most else f"no line is of {', '.join(FORMATS)}"
        raise ValueError(
            f"{fits}: give format=NAME (csv or jsonl for a table), or format=REGEX with (?P<step>...) and (?P<value>...)"
        )
    rest = f"; lines of {other} are not read: format={other} reads those instead" if second else ""
    notes.append(f"read as {name}{rest}")
    return name


def _read_lines(
    lines: Sequence[str], heads: Heads, notes: list[str], unfinished: dict[str, str]
) -> pd.DataFrame:
    """Read the lines that match a head, a row each; the other lines are searched for settings."""
    shapes = [_Shape(re.compile(head), names) for head, names in heads.items()]
    blocks: dict[tuple[str, ...], tuple[list[Any], ...]] = {}  # columns of the rows that have the same ones
    settings: dict[tuple[str, str], int] = {}
    at: list[int] = []
    unread: list[str] = []
    carried: dict[str, Any] = {"step": "0"}  # a line without a step or time has those of the line before
    for number, line in enumerate(lines, 1):
        for shape in shapes:
            if match := shape.head.search(line):
                break
        else:
            _keep_setting(settings, number, line)
            if "oss" in line and UNREAD.search(line[:FIGURES_WITHIN]):
                unread.append(f"line {number}")
            continue
        cells = match.groupdict()
        if "value" not in cells:
            if match.start() and (stamp := STAMP.search(line, 0, match.start())):
                carried["timestamp"] = stamp[0]
            width, figures = len(shape.columns), shape.figures(line, match.end())
            if number == len(lines) and len(figures) < width:
                unfinished[""] = f"line {number} is cut"  # no newline ends the file
                figures = {}
            cells = carried | figures | cells
            if "time_s" in cells:
                carried["time_s"] = cells["time_s"]
        carried["step"] = cells["step"]
        cells = {"": len(at), **cells}
        if not (block := blocks.get(names := tuple(cells))):
            block = blocks[names] = tuple([] for _ in names)
        for column, cell in zip(block, cells.values(), strict=True):
            column.append(cell)
        at.append(number)
    if not at:
        raise ValueError(f"no line matches format={' or '.join(heads)}: give another format=NAME or REGEX")
    columns: dict[str, Any] = {}
    for names, block in blocks.items():
        for name, column in zip(names[1:], block[1:], strict=True):
            if len(columns) < MOST_COLUMNS or name in columns:
                columns.setdefault(name, np.full(len(at), None, object))[block[0]] = np.array(column, object)
    if len(columns) == MOST_COLUMNS:
        notes.append(f"only the first {MOST_COLUMNS} figures by name are read")
    if unread:
        notes.append(f"lines with a loss of another form, not read: {some(unread)}")
    table = pd.DataFrame(columns, dtype=object, index=pd.Index(at, name="line"))
    if "total_steps" in table:
        unfinished.setdefault("", short_of(table["step"], table["total_steps"]))
    constants = _constants(settings, notes)
    return table.assign(**{name: constants[name] for name in constants if name not in table})


@dataclass(slots=True, eq=False)
class _Shape:
    """A head, and the pattern of its last line: a line of the same shape is read by one match, for speed."""

    head: re.Pattern[str]
    names: Mapping[str, str]
    pattern: re.Pattern[str] | None = None
    columns: tuple[str, ...] = ()
    units: Mapping[str, float] = field(default_factory=dict)

    def figures(self, line: str, start: int) -> dict[str, Any]:
        """Return the figures of a line by column; times are in seconds."""
        if match := self.pattern and self.pattern.fullmatch(line, start):
            cells: dict[str, Any] = dict(zip(self.columns, match.groups(), strict=True))
        else:
            cells = self._learn(line, start)
        for name, seconds in self.units.items():
            cells[name] = f"{float(cells[name]) * seconds:.9g}"
        return cells

    def _learn(self, line: str, start: int) -> dict[str, Any]:
        cells, shape, end = {}, "", start
        units: dict[str, float] = {}
        for figure in FIGURE.finditer(line, start, start + FIGURES_WITHIN):
            key, cell, unit = figure.groups()
            name = "_".join(key.lower().split()) + ("_s" if unit else "")
            name = self.names.get(name, name)
            if name not in cells:
                cells[name] = cell
                if unit:
                    units[name] = UNITS[unit.lower()]
                shape += line[end : figure.start(2)] + "\n"  # no line holds this: it stands for the number
                end = figure.end(2)
        shape = re.sub(r"(?:\\[-+])?(?<!\w)\d+", r"[-+]?\\d+", re.escape(shape + line[end:]))
        shape = re.sub(r"(?:\\ )+", " +", shape).replace("\\\n", LIKE_NUMBER)
        self.columns, self.units, self.pattern = tuple(cells), units, re.compile(shape)
        return cells


def short_of(steps: pd.Series[Any], totals: pd.Series[Any]) -> str:
    """Return why a run is unfinished, or "": whether another line was due between its last step and the planned one.

    A program that counts from 0 ends at `total - 1`, which counts as finished.
    """
    numbers, planned = (pd.to_numeric(each.astype(str), errors="coerce") for each in (steps, totals))
    taken, total = np.unique(np.append(0.0, numbers.dropna())), planned.max()
    due = np.median(np.diff(taken)) if taken.size > 1 else 0.0
    return f"step {taken[-1]:g} of {total:g}" if total - taken[-1] >= max(due, 2.0) else ""


def _keep_setting(settings: dict[tuple[str, str], int], number: int, line: str) -> None:
    """Keep the line's name and value if it is a setting, with the number of the first such line."""
    if len(line) < 200 and len(settings) < MOST_SETTINGS and (match := SETTING.match(line)):
        settings.setdefault((match[1], match[2]), number)


def _constants(settings: Mapping[tuple[str, str], int], notes: list[str]) -> dict[str, str]:
    """Return the settings as constant columns, and add a note with their lines."""
    if settings:
        notes.append(", ".join(f"{key}={value} (line {n})" for (key, value), n in settings.items()))
    return dict(settings.keys())


@dataclass(slots=True, eq=False)
class _MlperfRun:
    """A run of an MLPerf log: constants, time of `run_start` in ms, status of `run_stop`, and rows by line."""

    about: dict[str, Any]
    start: int | None = None
    status: str = "no run_stop"
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)


def _read_mllog(lines: Sequence[str], notes: list[str], unfinished: dict[str, str]) -> pd.DataFrame:
    """Read MLPerf's events: evaluations and tracked statistics are rows, every other value is a constant of its run."""
    runs = [_MlperfRun({})]
    settings: dict[tuple[str, str], int] = {}
    wrong: list[str] = []
    units: set[str] = set()
    for number, event in _events(lines, settings, wrong):
        key, value, now, run = str(event.get("key")), event.get("value"), event.get("time_ms"), runs[-1]
        if key in ("init_start", "run_start") and run.start:
            runs.append(run := _MlperfRun({**run.about}))
        if key == "run_start":
            run.start = now
        elif key == "run_stop":
            run.status = str(event["metadata"].get("status"))
            runs.append(_MlperfRun({**run.about}))
        elif key in ("eval_accuracy", "tracked_stats"):
            unit = next((name for name in MLLOG_STEPS if name in event["metadata"]), "")
            units.add(f"{key}: {unit or 'none, not read'}")
            if unit:
                figures = value if isinstance(value, dict) else {key: value}
                run.rows[number] = {MLLOG_NAMES.get(name, name): figures[name] for name in figures}
                run.rows[number]["samples"] = event["metadata"][unit]
                if isinstance(now, int) and isinstance(run.start, int):
                    run.rows[number]["time_s"] = (now - run.start) / 1000
        elif (
            event.get("event_type") == "POINT_IN_TIME"
            and isinstance(value, int | float | str)
            and len(run.about) < MOST_COLUMNS
        ):
            run.about[MLLOG_NAMES.get(key, key)] = value
    constants = _constants(settings, notes)
    if idle := sum(run.start is not None and not run.rows for run in runs):
        notes.append(f"runs without an evaluation, not read: {idle}")
    runs = [run for run in runs if run.rows and (run.start or run is runs[0])]
    rows: dict[int, dict[str, Any]] = {}
    for i, run in enumerate(runs, 1):
        name = "" if len(runs) == 1 else str(i)
        if run.status != "success":
            unfinished[name] = run.status
        about = {**constants, **run.about} | ({"run": name} if name else {})
        rows |= {number: about | row for number, row in run.rows.items()}
    if not rows:
        raise ValueError("no eval_accuracy and no tracked_stats with samples among its :::MLLOG lines")
    notes.append(f"samples by metadata of {', '.join(sorted(units))}")
    if wrong:
        notes.append(f"no event, not read: {some(wrong)}")
    return as_written([*rows.values()]).set_axis(pd.Index([*rows], name="line"))


def _events(
    lines: Sequence[str], settings: dict[tuple[str, str], int], wrong: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the events of an MLPerf log with their lines; an event that several ranks print comes once."""
    seen = set()
    for number, line in enumerate(lines, 1):
        _, mark, content = line.partition(":::MLLOG ")
        if not mark:
            _keep_setting(settings, number, line)
        elif content not in seen:
            seen.add(content)
            try:
                event = from_json(content)
            except ValueError:
                event = None
            if isinstance(event, dict) and isinstance(event.get("metadata"), dict):
                yield number, event
            else:
                wrong.append(f"line {number}")


def as_written(records: Any) -> pd.DataFrame:
    """Return a row for each record; a written NaN becomes the text "nan", so that it is not taken for a missing key.

    Raises:
        ValueError: `records` is not a list of objects.
    """
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise ValueError(
            "expected objects: one a line, or a list, as log_history of Hugging Face's trainer_state.json"
        )
    written = [{key: "nan" if cell != cell else cell for key, cell in each.items()} for each in records]
    return pd.DataFrame(written, dtype=object)
