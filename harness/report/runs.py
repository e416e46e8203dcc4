"""Runs: what a report is made of, read from the store and grouped by machine.

A *machine* is one environment (`env_id`): the same device, power limit, driver and versions. Times of different
environments stand in different sections; what one machine gained may be set beside what another gained.

Runs are in the order in which they were made. Where several measured the same case and arm, figures and headlines take
the newest; tables show all of them, with their run.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

import numpy as np
import pandas as pd

from harness import store
from harness.judge import diagnosis
from harness.judge.model_title import title_of
from harness.judge.reproduced import reproductions
from harness.judge.verdict import judge
from harness.judge.verdict.rows import setups
from harness.machine.ceilings import Ceilings, ceilings
from harness.machine.hardware import Device, of_env
from harness.store import run_state, stats, text
from harness.store.case import arms_of
from harness.store.compare import DISAGREE, TIE, TIMES, pairs_of, with_rates
from harness.store.errors import Cause, UsageError
from harness.store.outside import parse
from harness.store.private import public
from harness.store.reading import ReadLimits
from harness.store.rows import Rows, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from harness.judge.diagnosis import Finding
    from harness.judge.reproduced import Reproduction
    from harness.judge.verdict import ArmVerdict
    from harness.judge.verdict.rows import StoredSetup
    from harness.report.table import Row
    from harness.store.case import Arm
    from harness.store.rows import Wanted

F = TypeVar("F", bound="Callable[..., Any]")
_IDENTITY = [
    "run_id",
    "suite",
    "case_id",
    "arm",
    "metric",
    "regime",
    "part",
    "attempt",
]  # of a row, within a machine


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file behind the report: name, link from the report, size in bytes and checksum."""

    name: str
    href: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoredRun:
    """One run folder: what `_run.json` says about it and its data files."""

    run_id: str
    sweep: str
    about: Row
    files: tuple[DataFile, ...]

    @property
    def state(self) -> str:
        """finished, interrupted, failed, running, or unknown where _run.json is missing."""
        return str(self.about.get("state", "unknown"))

    @property
    def state_note(self) -> str:
        """What a reader must know about a run that did not finish; empty for one that did."""
        done, total = self.about.get("parts_done"), self.about.get("parts_total")
        after = ""
        if isinstance(done, list) and isinstance(total, int):
            after = f", after part {len(done)} of {total} ({', '.join(map(str, done))})"
        notes = {
            "finished": "",
            "interrupted": "was interrupted: what it had finished until then is here, the rest is missing",
            "failed": "ended early: rows could not be written, or a shard did not finish; the earlier ones are here",
            "running": f"has not ended: it is still running or was killed{after}; what it had stored so far is here",
        }
        return notes.get(self.state, "has no readable _run.json, so its command and how it ended are unknown")


@dataclass(frozen=True, eq=False)
class Machine:
    """All rows of one environment.

    Attributes:
        env_id: its name in the store.
        envs: distinct ones, the first rows' first: they differ in what no time depends on, such as the commit.
        runs: whose rows they are.
        frame: rows of the store, with `tflops`, `gb_per_s` and `commit` added.
        arms: of all machines of the page, so that a recipe looks the same in every figure.
        memo: of `once`.
    """

    env_id: str
    envs: tuple[Row, ...]
    runs: tuple[StoredRun, ...]
    frame: pd.DataFrame
    arms: frozenset[Arm]
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def env(self) -> Row:
        """The environment of the first rows."""
        return self.envs[0]

    @cached_property
    def rows(self) -> Rows:
        """The rows of the frame as records."""
        return Rows(self.frame)

    def pick(self, **wanted: Wanted) -> list[Row]:
        """The rows with these values, to be read only; where several are given for a field, with any of them."""
        return self.rows.pick(None, **wanted)

    @cached_property
    def every_pair(self) -> list[Row]:
        """Paired ratios of all runs of this machine, to be read only."""
        return pairs_of(self.pick(metric=TIMES))

    @cached_property
    def pairs(self) -> list[Row]:
        """The newest of them for each case, arm and regime; one that could be formed before one that could not.

        Where another run of the same code shows another ratio, it decides nothing; else its interval holds those of all of them, a verdict that
        this interval does not bear is "unclear", and its clocks are those that lie furthest apart; `runs` counts them.
        """
        found = newest(self.every_pair, lambda pair: pair["speedup"] == pair["speedup"])
        if len(self.runs) < 2:
            return found
        others: dict[tuple[str, ...], list[Row]] = {}
        for pair in self.every_pair:
            others.setdefault(_measured(pair), []).append(pair)
        return [self._beside(pair, others[_measured(pair)]) for pair in found]

    def _beside(self, pair: Row, others: Sequence[Row]) -> Row:
        codes = self._codes
        same = [o for o in others if codes[o["run_id"]] == codes[pair["run_id"]] and o["low"] == o["low"]]
        apart = [o for o in same if _apart(pair, o)]
        if not same:
            return pair
        if not apart:
            low, high = min(o["low"] for o in same), max(o["high"] for o in same)
            clocks: dict[str, Any] = max((dict(_clocks(o)) for o in (pair, *same)), key=_apart_by)
            runs = len({o["run_id"] for o in (pair, *same)})
            found = {**pair, "low": low, "high": high, "runs": runs, **clocks}
            bears = {
                "faster": low > 1,
                "slower": high < 1,
                "same": max(high, 1 / low) <= max(TIE, pair["floor"]),
            }
            if bears.get(pair["verdict"], True):
                return found
            return found | {
                "verdict": "unclear",
                "reason": f"the interval of all runs is {text.interval(low, high)}",
            }
        speedups = ", ".join(f"{text.ratio(o['speedup'])} in {o['run_id']}" for o in (pair, *apart[:3]))
        return {**pair, "verdict": "unclear", "condition": DISAGREE, "reason": f"{DISAGREE}: {speedups}"}

    @cached_property
    def _codes(self) -> dict[str, set[str]]:
        """What was run, by run: the hash over the sources, else the commit."""
        found: dict[str, set[str]] = {}
        for run, env in self.frame[["run_id", "env"]].drop_duplicates().itertuples(index=False):
            about = parse(env)
            found.setdefault(run, set()).add(str(about.get("code") or about.get("git_commit")))
        return found

    @cached_property
    def trainings(self) -> list[StoredSetup]:
        """The training runs of the suite `divergence`, by set-up."""
        return setups(self.frame)

    @cached_property
    def verdicts(self) -> list[ArmVerdict]:
        """The loss verdict on each arm of each of these set-ups."""
        return judge(self.frame)

    @cached_property
    def findings(self) -> list[Finding]:
        """What is probably wrong in these rows."""
        return diagnosis.findings(self.frame, self.verdicts, self.pairs, self.rows)

    @cached_property
    def reproductions(self) -> dict[str, Reproduction]:
        """Whether each arm of a peer does here what its authors publish, by the arm's name; a CPU says nothing of it."""
        return reproductions(self.pick(metric=TIMES), self.every_pair) if self.is_gpu else {}

    @cached_property
    def device(self) -> Device | None:
        """The entry of the table of peaks; None (N/A) for a CPU and for what is not in it."""
        return of_env(self.env)

    @cached_property
    def controls(self) -> set[str]:
        """What the arms without FP8 computed in: "bf16", "fp32" or both."""
        return {computed_in(axes) for axes in self.frame["axes"].unique()}

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """What this machine reached at best; None where nothing of the kind was measured."""
        return ceilings(self.frame)

    @property
    def achieved(self) -> dict[str, float]:
        """Best TFLOP/s by rate name, "bf16" and "fp8"; empty where no product was measured."""
        return self.ceilings.achieved if self.ceilings else {}

    @cached_property
    def suites(self) -> tuple[str, ...]:
        """Names of the suites that were measured, in that order."""
        return tuple(self.frame["suite"].unique())

    @cached_property
    def _constant(self) -> dict[str, frozenset[str]]:
        groups = self.frame.groupby("suite", sort=False)["axes"]
        return {str(suite): frozenset(text.constant_axes(own.unique())) for suite, own in groups}

    def constant_axes(self, suite: str) -> frozenset[str]:
        """Axes that say nothing about a case of this suite, having one value in all of them."""
        return self._constant.get(suite, frozenset())

    def label(self, row: Mapping[str, Any]) -> str:
        """The case of a row in words, without the axes that say nothing."""
        return text.case_label(text.axes_of(row["axes"]), self.constant_axes(row["suite"]))

    @property
    def commits(self) -> tuple[str, ...]:
        """The commits whose code was measured, seven digits each, a "+" where the tree had other changes."""
        return tuple(dict.fromkeys(c for c in self.frame["commit"].unique() if c))

    @property
    def is_gpu(self) -> bool:
        """Whether the rows were measured on a GPU."""
        return self.env.get("device") not in (None, "", "cpu")

    @property
    def name(self) -> str:
        """The device in words."""
        device = str(self.env.get("gpu") or self.env.get("device"))
        return device if self.is_gpu else f"CPU: {self.env.get('cpu') or 'model unknown'}"

    @cached_property
    def subject(self) -> str:
        """What was run, of which model, and on what, in a line."""
        sweeps = [*dict.fromkeys(run.sweep for run in self.runs)]
        cases = rows_of(self.frame[self.frame["axes"].str.contains('"model":')].drop_duplicates("axes"))
        models = [*dict.fromkeys(title_of(row).partition(", ")[0] for row in cases)]
        what = ", ".join(sweeps) if len(sweeps) < 4 else f"{len(sweeps)} sweeps"
        which = models[0] if len(models) == 1 else f"{len(models)} models" if models else ""
        return ", ".join(filter(None, (what, which, self.name)))

    @property
    def days(self) -> list[str]:
        """The first and the last day on which rows were measured (UTC), or the only one."""
        days = sorted({str(t)[:10] for t in self.frame["created_at"].unique() if t})
        return list(dict.fromkeys((*days[:1], *days[-1:])))


def newest(records: Iterable[Row], is_whole: Callable[[Row], bool]) -> list[Row]:
    """Record of the newest run for each case, arm, regime and metric; prefer whole ones."""
    found: dict[tuple[str, ...], Row] = {}
    for r in records:
        key = _measured(r)
        if key not in found or is_whole(r) or not is_whole(found[key]):
            found[key] = r
    return list(found.values())


def _measured(record: Row) -> tuple[str, ...]:
    """What a record measured, whichever run it is of."""
    return record["suite"], record["case_id"], record["arm"], record["regime"], record["metric"]


def _clocks(pair: Row) -> dict[str, float]:
    return {name: pair[name] for name in ("clock_mhz", "baseline_clock_mhz")}


def _apart_by(clocks: Mapping[str, float]) -> float:
    """How far two clocks lie apart, as a ratio; 0 where one is not known."""
    low, high = sorted(clocks.values())
    return high / low if low > 0 else 0.0


def _apart(one: Row, other: Row) -> bool:
    """Whether two ratios lie further apart than their intervals, their noise floors and a tie allow."""
    low, high = sorted((one, other), key=lambda pair: pair["speedup"])
    between = high["low"] / low["high"]
    return between > 1 and high["speedup"] / low["speedup"] > max(
        TIE, *(pair["floor"] for pair in (one, other) if pair["floor"] > 1), 1.0
    )


def computed_in(axes: str) -> str:
    """ "bf16", or "fp32" where a case says that all but FP8 is computed so, whatever its arms are called."""
    return "fp32" if parse(axes).get("compute") == "fp32" else "bf16"


def dates(days: Sequence[str]) -> str:
    """The first and the last of some days in order."""
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:]))) or "date unknown"


def once(function: F) -> F:
    """What follows from a machine's rows is worked out once; every caller gets the same object, to be read only."""

    @wraps(function)
    def remembered(machine: Machine, *args: Any) -> Any:
        key = (function, args)
        if key not in machine.memo:
            machine.memo[key] = function(machine, *args)
        return machine.memo[key]

    return cast("F", remembered)


@dataclass(frozen=True)
class Material:
    """Everything that one report is made of."""

    machines: tuple[Machine, ...]
    problems: tuple[str, ...]

    @property
    def runs(self) -> tuple[StoredRun, ...]:
        """All runs, each once."""
        return tuple({id(run): run for machine in self.machines for run in machine.runs}.values())


def load(paths: Sequence[Path], out_folder: Path) -> Material:
    """Reads run folders into machines.

    Args:
        paths: run folders, folders above them, or single Parquet files.
        out_folder: where the report will lie; links to the data are relative to it.

    Raises:
        UsageError: a path is missing, is not a run, or there is not one readable row.
    """
    for _ in range(3):
        folders: dict[Path, list[Path]] = {}
        files = {os.path.realpath(file): file for path in reversed(paths) for file in _parquet_files(path)}
        for file in sorted(files.values()):
            folders.setdefault(store.run_folder(file), []).append(file)
        problems: list[str] = []
        parts: list[tuple[StoredRun, pd.DataFrame]] = []
        limits = ReadLimits.of(None)
        for folder, own in folders.items():
            frame = store.open_run(own, limits)
            problems += frame.attrs["problems"]
            if len(frame):
                parts.append((_run(folder, frame, out_folder), _sound(frame)))
        if all(map(os.path.lexists, files.values())):
            break  # else a run has closed meanwhile and moved its rows to another file
    if not parts:
        why = f" ({problems[0]})" if problems else ": measure first, sweep=NAME"
        raise UsageError(f"no rows in {', '.join(map(str, paths))}{why}")
    parts.sort(key=lambda part: (str(part[1]["created_at"].min()), part[0].run_id))
    return Material(_machines(parts), tuple(public(problems)))


def _sound(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows as a report can use them, with no time that cannot be one.

    A row whose samples are not finite and positive becomes a failed one that says so; it stays visible.
    """
    attributes = frame.attrs
    frame = _plain(frame)
    frame["commit"] = frame["env"].map({env: _commit(parse(env)) for env in frame["env"].unique()})
    timed = frame["metric"].isin(TIMES) & (frame["status"] == "ok")
    impossible = timed[timed].index[~stats.all_are_times(frame.loc[timed, "samples"])]
    why = "a stored sample is no time: not finite, or not above 0"
    instead: Row = {"reason": why, "status": "failed", "cause": str(Cause.ERROR), "value": math.nan}
    for column, value in instead.items():
        frame.loc[impossible, column] = value
    frame.attrs = attributes
    return frame


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Text as objects, equal ones as one: pandas takes ten times as long to hand out a string of its own type."""
    texts = {}
    for name in (str(n) for n, kind in frame.dtypes.items() if isinstance(kind, pd.StringDtype)):
        codes, words = pd.factorize(frame[name])
        texts[name] = pd.Series(np.array([*words, None], dtype=object)[codes], frame.index, dtype=object)
    return frame.assign(**texts)


def _commit(env: Mapping[str, Any]) -> str:
    commit = str(env.get("git_commit") or "")[:7]
    return commit + ("+" if commit and env.get("git_dirty") else "")


def _parquet_files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"no such run: {path}; a run is a folder results/<sweep>/<run_id>")
    if path.is_dir():
        found = sorted(path.rglob("*.parquet"))
        if not found:
            raise UsageError(f"{path} is not a run: it holds no *.parquet file")
        return found
    if path.suffix != ".parquet":
        raise UsageError(f"{path} is not a run: expected a folder or a *.parquet file")
    return [path]


def _run(folder: Path, frame: pd.DataFrame, out_folder: Path) -> StoredRun:
    files = []
    for path in map(Path, frame.attrs["files"]):
        content, href = path.read_bytes(), Path(os.path.relpath(path, out_folder)).as_posix()
        files.append(
            DataFile(path.name, quote(public(href)), len(content), hashlib.sha256(content).hexdigest())
        )
    first = frame.iloc[0]
    return StoredRun(str(first["run_id"]), str(first["sweep"]), run_state.about(folder), tuple(files))


def _machines(parts: list[tuple[StoredRun, pd.DataFrame]]) -> tuple[Machine, ...]:
    machines = []
    arms = frozenset(arm for _, frame in parts for arm in arms_of(frame))
    for env_id in dict.fromkeys(e for _, frame in parts for e in frame["env_id"]):
        own = [(run, rows) for run, frame in parts if len(rows := frame[frame["env_id"] == env_id])]
        whole = pd.concat([rows for _, rows in own], ignore_index=True)
        if len(own) > 1:  # a run that was copied is one run
            whole = whole.drop_duplicates(_IDENTITY, ignore_index=True)
        envs = tuple(dict(parse(env)) for env in whole["env"].unique())
        machines.append(Machine(str(env_id), envs, tuple(run for run, _ in own), with_rates(whole), arms))
    # GPUs first: they are what the question is about.
    return tuple(sorted(machines, key=lambda m: (not m.is_gpu, m.name, m.env_id)))
