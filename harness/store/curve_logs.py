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

    from harness.store.stats import Vector

    Heads = Mapping[str, Mapping[str, str]]

# Format -> how a line begins, with the groups `step` and `total` (the planned last step) -> its figures' columns.
# The first that a line matches counts. A line without `step` belongs to the last step before it.
FORMATS: Mapping[str, Heads] = {
    "mllog": {r":::MLLOG ": {}},
    "megatron": {
        r"iteration +(?P<step>\d+)/ *(?P<total>\d+) \|": {
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
        r"step +(?P<step>\d+)(?:/(?P<total>\d+))? (?:\(\S+\) )?\| (?=loss:)": {
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
        r"step +(?P<step>\d+)/(?P<total>\d+) \| (?=(?:train )?loss )": {
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
    "modded_nanogpt": {r"step:(?P<step>\d+)/(?P<total>\d+) (?=\w+:)": {"train_time_s": "time_s"}},
    "mlflow": {r"^(?P<timestamp>\d{13}) (?P<value>\S+) (?P<step>\d+)\s*$": {}},
}
NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)"
LIKE_NUMBER = r"([-+\d.,eE]+|-?(?:nan|NaN|NAN|inf|Inf|INF))"  # where one stood in the line before
FIGURE = re.compile(
    rf"(?<!\w)((?:[a-z_(][\w/()%.-]{{0,40}}(?: |(?=[:=]))){{1,8}})[:=]? {{0,20}}({NUMBER}) ?(ms|s|m)?(?![\w.])",
    re.IGNORECASE,
)
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}  # seconds
FIGURES_WITHIN = 4000  # characters of a line
MOST_COLUMNS = 100
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
        UsageError: `format` is none.
        ValueError: no format or several fit, or no line matches.
    """
    lines = (ESCAPE.sub("", text) if "\x1b" in text else text).split("\n")
    notes: list[str] = []
    unfinished: dict[str, str] = {}
    heads = _heads(format or _recognised(lines, notes))
    if ":::MLLOG " in heads:
        table = _mllog(lines, notes, unfinished)
    else:
        table = _lines(lines, heads, format in FORMATS or not format, notes, unfinished)
    table.attrs = {"notes": notes, "unfinished": unfinished, "has_gaps": True}
    return table


def _heads(format: str) -> Heads:
    if format in FORMATS:
        return FORMATS[format]
    try:
        groups = re.compile(format).groupindex.keys()
    except re.error:
        groups = {}.keys()
    if not {"step", "value"} <= groups:
        raise UsageError(
            f"format={printable(format)}: expected {', '.join(FORMATS)}, or a regular expression with (?P<step>...) and "
            "(?P<value>...)"
        )
    return {format: {}}


def _recognised(lines: Sequence[str], notes: list[str]) -> str:
    """Name of the format that most lines match; MLPerf's counts where it has any line."""
    counts: Counter[str] = Counter()
    sample = lines[:: max(1, len(lines) // SAMPLE)]
    for name, heads in FORMATS.items():
        for head in map(re.compile, heads):
            counts[name] += sum(head.search(line) is not None for line in sample)
    (name, most), (other, second) = counts.most_common(2)
    if counts["mllog"]:
        name, other, second = "mllog", name if name != "mllog" else other, most if name != "mllog" else second
    elif not most or most == second:
        fits = f"its lines fit {name} and {other} alike" if most else f"no line is of {', '.join(FORMATS)}"
        raise ValueError(f"{fits}: give format=NAME, or format=REGEX with (?P<step>...) and (?P<value>...)")
    rest = f"; its lines of {other} are not read: format={other} reads those instead" if second else ""
    notes.append(f"read as {name}{rest}")
    return name


def _lines(
    lines: Sequence[str], heads: Heads, has_figures: bool, notes: list[str], unfinished: dict[str, str]
) -> pd.DataFrame:
    """The lines that begin as the format's, by its heads."""
    shapes = [_Shape(re.compile(head), names) for head, names in heads.items()]
    blocks: dict[tuple[str, ...], tuple[list[int], list[tuple[str, ...]]]] = {}  # rows of the same columns
    at: list[int] = []
    unread: list[int] = []
    clock: dict[str, str] = {}
    step, total, settings = "0", "0", _Settings()
    for number, whole in enumerate(lines, 1):
        for line in whole.split("\r") if "\r" in whole else (whole,):
            for shape in shapes:
                if match := shape.head.search(line):
                    break
            else:
                settings.see(number, line)
                if "oss" in line and UNREAD.search(line[:FIGURES_WITHIN]):
                    unread.append(number)
                continue
            cells = match.groupdict()
            step = cells["step"] = cells.get("step", step)
            total = cells.pop("total", total) or total
            if has_figures:
                if found := STAMP.search(line, 0, match.start()):
                    clock = {"timestamp": found[0]}
                width = len(shape.columns)
                figures = shape.figures(line, match.end())
                if number == len(lines) and len(figures) < width:
                    unfinished[""] = f"line {number} is cut"  # no newline ends the file
                    figures = {}
                clock = {"time_s": figures["time_s"]} if "time_s" in figures else clock
                cells = clock | figures | cells  # a line without a time has the last one's
            rows, block = blocks.setdefault(tuple(cells), ([], []))
            rows.append(len(at))
            block.append(tuple(cells.values()))
            at.append(number)
    if not at:
        raise ValueError(f"no line matches format={' or '.join(heads)}: give another format=NAME or REGEX")
    columns = {"step": np.full(len(at), None, object)}
    for names, (rows, block) in blocks.items():
        for name, cells_of in zip(names, zip(*block, strict=True), strict=True):
            if len(columns) < MOST_COLUMNS or name in columns:
                columns.setdefault(name, np.full(len(at), None, object))[rows] = np.array(cells_of, object)
    if len(columns) >= MOST_COLUMNS:
        notes.append(f"only the first {MOST_COLUMNS} figures by name are read")
    if unread:
        notes.append(f"lines with a loss of another form, not read: {_some(unread)}")
    if total != "0" and (why := _short_of(columns["step"].astype(float), float(total))):
        unfinished[""] = why
    table = pd.DataFrame(columns, dtype=object, index=pd.Index(at, name="line"))
    return table.assign(**{k: v for k, v in settings.told(notes).items() if k not in columns})


@dataclass(slots=True, eq=False)
class _Shape:
    """How the last line of a head looked: a line like it is read by one match in place of a search for its figures."""

    head: re.Pattern[str]
    names: Mapping[str, str]
    pattern: re.Pattern[str] | None = None
    columns: tuple[str, ...] = ()
    units: Mapping[str, float] = field(default_factory=dict)

    def figures(self, line: str, start: int) -> dict[str, str]:
        """The figures of a line by column; times in seconds."""
        if match := self.pattern and self.pattern.fullmatch(line, start):
            cells = dict(zip(self.columns, match.groups(), strict=True))
        else:
            cells = self._learn(line, start)
        for name, seconds in self.units.items():
            cells[name] = f"{float(cells[name]) * seconds:.9g}"
        return cells

    def _learn(self, line: str, start: int) -> dict[str, str]:
        units: dict[str, float] = {}
        cells, pattern, end = {}, "", start
        for figure in FIGURE.finditer(line, start, start + FIGURES_WITHIN):
            key, cell, unit = figure.groups()
            name = re.sub(r"\s+", "_", key.strip().lower()) + ("_s" if unit else "")
            name = self.names.get(name, name)
            if name not in cells:
                cells[name] = cell
                units |= {name: UNITS[unit.lower()]} if unit else {}
                between = re.sub(r"(?:\\[-+])?\d+", r"[-+]?\\d+", re.escape(line[end : figure.start()]))
                pattern += between + re.escape(line[figure.start() : figure.start(2)]) + LIKE_NUMBER
                end = figure.end(2)
        pattern += re.sub(r"(?:\\[-+])?\d+", r"[-+]?\\d+", re.escape(line[end:]))
        self.columns, self.units = tuple(cells), units
        self.pattern = re.compile(re.sub(r"(?:\\ )+", " +", pattern)) if len(line) < FIGURES_WITHIN else None
        return cells


def _short_of(steps: Vector, total: float) -> str:
    """Why a run is unfinished that logs these steps: another line was due before `total`. "" where none was.

    A program that counts from 0 ends at `total - 1`, which is no reason.
    """
    taken = np.unique(steps)
    due = float(np.median(np.diff(taken))) if taken.size > 1 else 1.0
    return f"step {taken[-1]:g} of {total:g}" if total - taken[-1] >= max(due, 2.0) else ""


@dataclass(slots=True, eq=False)
class _Settings:
    """Settings on lines of their own, each with the line that it was seen in."""

    values: dict[str, str] = field(default_factory=dict)
    seen: dict[tuple[str, str], int] = field(default_factory=dict)

    def see(self, number: int, line: str) -> None:
        """Take the setting of a line, where it is one."""
        if len(line) < 200 and (match := SETTING.match(line)):
            key, value = match.groups()
            self.values[key] = value
            self.seen.setdefault((key, value), number)

    def told(self, notes: list[str]) -> Mapping[str, str]:
        """The values, which a note names by line."""
        if self.seen:
            notes.append(", ".join(f"{key}={value} (line {n})" for (key, value), n in self.seen.items()))
        return self.values


@dataclass(slots=True, eq=False)
class _MlperfRun:
    """A run of an MLPerf log: constants, time of `run_start` in ms, rows by line, and the status of its end."""

    about: dict[str, Any]
    start: float | None = None
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    status: str = "no run_stop"


def _mllog(lines: Sequence[str], notes: list[str], unfinished: dict[str, str]) -> pd.DataFrame:
    """MLPerf's events: evaluations and tracked statistics as rows by samples, every other figure as a constant of its run."""
    runs: list[_MlperfRun] = []
    settings, by = _Settings(), Counter[str]()
    about: dict[str, Any] = {}
    wrong: list[int] = []
    for number, event in _events(lines, settings, wrong):
        key, value, more = event.get("key"), event.get("value"), event.get("metadata")
        more = more if isinstance(more, dict) else {}
        now = event.get("time_ms")
        if key in ("init_start", "run_start") and runs and runs[-1].about is about:
            about = dict(about)
        if key == "run_start":
            runs.append(_MlperfRun(about, now))
        elif key in ("run_stop", "eval_accuracy", "tracked_stats"):
            if not runs:
                runs.append(_MlperfRun(about))
            run = runs[-1]
            if key == "run_stop":
                run.status = str(more.get("status"))
                about = dict(about)
                continue
            name = next((name for name in MLLOG_STEPS if name in more), "")
            by[f"{key}: {name or 'no step, not read'}"] += 1
            if name:
                figures = value if isinstance(value, dict) else {key: value}
                elapsed = (now - run.start) / 1000 if isinstance(now, int) and run.start else None
                run.rows[number] = {"samples": more[name], "time_s": elapsed} | {
                    MLLOG_NAMES.get(k, k): v for k, v in figures.items() if not isinstance(v, dict | list)
                }
        elif event.get("event_type") == "POINT_IN_TIME" and isinstance(value, int | float | str):
            about[MLLOG_NAMES.get(str(key), str(key))] = value
    told = settings.told(notes)
    if by:
        notes.append(f"samples are metadata of {', '.join(by)}")
    if wrong:
        notes.append(f"no event, not read: {_some(wrong)}")
    rows: dict[int, dict[str, Any]] = {}
    for i, run in enumerate(runs, 1):
        alone = len(runs) == 1
        if run.status != "success":
            unfinished["" if alone else str(i)] = run.status
        about = {**told, **run.about} | ({} if alone else {"run": str(i)})
        rows |= {number: about | row for number, row in run.rows.items()}
    if not rows:
        raise ValueError("no eval_accuracy and no tracked_stats among its :::MLLOG lines")
    return as_written([*rows.values()]).set_axis(pd.Index([*rows], name="line"))


def _events(
    lines: Sequence[str], settings: _Settings, wrong: list[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of an MLPerf log by line, each once however many ranks print it."""
    seen = set()
    for number, line in enumerate(lines, 1):
        _, mark, content = line.partition(":::MLLOG ")
        if not mark:
            settings.see(number, line)
        elif content not in seen:
            seen.add(content)
            try:
                event = from_json(content)
            except ValueError:
                event = None
            if isinstance(event, dict):
                yield number, event
            else:
                wrong.append(number)


def as_written(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a record; NaN that was written as a text, so that it is not taken for a key that is missing."""
    written = [{key: "nan" if cell != cell else cell for key, cell in each.items()} for each in records]
    return pd.DataFrame(written, dtype=object)


def _some(numbers: Sequence[int]) -> str:
    return some([f"line {number}" for number in numbers], 3, ", ")
