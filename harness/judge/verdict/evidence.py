"""Evidence: runs of a base and of a candidate, made anywhere, with what was read of them and the steps that all of them reached."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from harness.store import text
from harness.store.curve_files import NOT_FINITE, run_names, tidy
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from harness.store.stats import Vector

SIDES = "base", "candidate"
MOST_RUNS = 200  # of a file; more are rows that were taken for runs
CLUSTERS = "machine", "host", "hostname", "system", "stack", "arm"  # columns that say where a run ran
BROKEN_TIMES = 10.0  # a loss above so many times the first ones is broken, as NaN is
NEAR = 0.1  # of the distance of two values: steps nearer than this are one
SEED = re.compile(r"seed[-_=]?(\d+)")


class CodedFinding(NamedTuple):
    """What speaks against a word: a code, what was seen, and whether it withholds every word or PASS alone."""

    code: str
    text: str = ""
    is_soft: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LossRun:
    """One run as read.

    Attributes:
        name: of the run.
        steps: increasing, [T].
        values: its loss after them, [T].
        last: the last step of any row, with a loss or without.
        columns: names of the loss and of the steps.
        seconds: at the steps; None without a clock.
        seed: None where nothing tells it.
        settings: other columns that are constant, by name.
        series: other columns that are not: their rows, with the steps as index.
        unfinished: what marks it as broken off.
    """

    name: str
    steps: Vector
    values: Vector
    last: float
    columns: tuple[str, str] = ("loss", "step")
    seconds: Vector | None = None
    seed: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    series: Mapping[str, pd.Series[Any]] = field(default_factory=dict)
    unfinished: str = ""

    @property
    def broken(self) -> NDArray[np.bool_]:
        """Where the loss is NaN, infinite or far above the first ones."""
        finite = np.isfinite(self.values)
        first = np.abs(self.values[finite][: max(1, finite.sum() // 10)])
        return ~finite | (np.abs(self.values) > BROKEN_TIMES * first.max(initial=0))

    @property
    def spacing(self) -> float:
        """The usual distance of two losses in steps; infinite for one loss."""
        return float(np.median(np.diff(self.steps))) if self.steps.size > 1 else math.inf

    def second_at(self, step: float) -> float:
        """Seconds until a step; NaN without a clock."""
        return math.nan if self.seconds is None else float(np.interp(step, self.steps, self.seconds))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is judged.

    Attributes:
        base, candidate: runs.
        paired: runs of one seed share weights and batches; runs are in the order of their seeds.
        margin: of equivalence, a share of the base's loss.
        window: how many last values count; 0: chosen from the data.
        target: the loss at which runs stop, where one was named.
        cluster: the column that names the cluster of a run; "": the first of `CLUSTERS` that all runs have.
        between: standard deviation between clusters, a share of the loss; 0: not known.
        treatment: settings that name what is compared.
        waived: settings that are known to differ.
        excused: codes of findings that withhold nothing.
        notes: what the readers say.
        alone: runs left out, whose seed the other side lacks.
        noise: runs that resemble these, whose spread says how many are needed where that of a side is not known.
    """

    base: Sequence[LossRun]
    candidate: Sequence[LossRun]
    paired: bool = False
    margin: float = 0.0025
    window: int = 0
    target: float | None = None
    cluster: str = ""
    between: float = 0.0
    treatment: Sequence[str] = ()
    waived: Sequence[str] = ()
    excused: Sequence[str] = ()
    notes: Sequence[str] = ()
    alone: Sequence[str] = ()
    noise: Sequence[LossRun] = ()

    @property
    def sides(self) -> tuple[Sequence[LossRun], Sequence[LossRun]]:
        """Base and candidate."""
        return self.base, self.candidate

    @property
    def runs(self) -> list[LossRun]:
        """All of them, those of the base first."""
        return [*self.base, *self.candidate]

    @cached_property
    def near(self) -> float:
        """Steps that are no further apart are one."""
        return NEAR * min(run.spacing for run in self.runs)

    @cached_property
    def end(self) -> float:
        """The last step that every run reached."""
        return min(float(run.steps[-1]) for run in self.runs)

    @cached_property
    def common(self) -> tuple[Vector, Vector]:
        """(steps [K], losses [runs, K]) after step 0 that every run has; NaN where it broke."""
        fewest = min(self.runs, key=lambda run: run.steps.size).steps
        steps = fewest[(fewest > 0) & (fewest <= self.end + self.near)]
        rows, everywhere = [], np.ones(steps.size, bool)
        for run in self.runs:
            at, is_near = self.nearest(run, steps)
            everywhere &= is_near
            rows.append(np.where(run.broken, np.nan, run.values)[at])
        return steps[everywhere], np.array(rows)[:, everywhere]

    def nearest(self, run: LossRun, steps: Vector) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(index of a run's value that is nearest to each of some steps, whether it lies there)."""
        right = np.clip(np.searchsorted(run.steps, steps), 0, run.steps.size - 1)
        left = np.maximum(right - 1, 0)
        at = np.where(np.abs(run.steps[left] - steps) < np.abs(run.steps[right] - steps), left, right)
        return at, np.abs(run.steps[at] - steps) <= (self.near if math.isfinite(self.near) else 0)

    @cached_property
    def whole(self) -> tuple[Vector, Vector]:
        """`common` without the steps at which some run broke."""
        steps, losses = self.common
        kept = np.isfinite(losses).all(axis=0)
        return steps[kept], losses[:, kept]

    @cached_property
    def cluster_column(self) -> str:
        """The setting that names clusters; "" where there is none."""
        asked = [self.cluster] if self.cluster else CLUSTERS
        return next((name for name in asked if all(name in run.settings for run in self.runs)), "")

    @property
    def clusters(self) -> tuple[list[str], list[str]]:
        """The cluster of each run; empty where none is known."""
        name = self.cluster_column
        base, candidate = ([run.settings[name] for run in side] if name else [] for side in self.sides)
        return base, candidate

    def with_values(self, column: str) -> Evidence | None:
        """The same runs by another of their series; None where a run lacks it."""
        if not all(column in run.series for run in self.runs):
            return None
        base, candidate = ([_of_series(run, column) for run in side] for side in self.sides)
        return replace(self, base=base, candidate=candidate, notes=())


def _of_series(run: LossRun, column: str) -> LossRun:
    series = run.series[column]
    steps, values = series.index.to_numpy(float), series.to_numpy(float)
    return replace(run, steps=steps, values=values, columns=(column, run.columns[1]), seconds=None, series={})


def evidence_of(
    frames: Sequence[Sequence[pd.DataFrame]], value: str, step: str, *, paired: bool, **asked: Any
) -> Evidence:
    """Evidence from frames of both sides, each of one run or of several by a column `run`.

    Raises:
        UsageError: a side without runs, a column that is missing, a cell that is no number; paired, and a run has no seed of
            its own.
    """
    notes: list[str] = []
    sides = [list(runs_of(each, side, value, step, notes)) for each, side in zip(frames, SIDES, strict=True)]
    if not all(sides):
        raise UsageError(f"{len(frames[0])} base and {len(frames[1])} candidate frames: both sides need some")
    alone: list[str] = []
    if paired:
        seeds = [_by_seed(side) for side in sides]
        both = sorted(seeds[0].keys() & seeds[1].keys())
        alone = [run.name for own in seeds for seed, run in own.items() if seed not in both]
        paired = bool(both)  # without a pair they are shown as runs of their own, beside `seed_missing`
        if paired:
            sides = [[own[seed] for seed in both] for own in seeds]
    if (name := asked.get("cluster")) and not all(name in run.settings for side in sides for run in side):
        known = text.some(sorted({name for side in sides for run in side for name in run.settings}), 12, ", ")
        raise UsageError(
            f"cluster={text.printable(name)}: no such constant column in every run; there are {known or 'none'}"
        )
    return Evidence(sides[0], sides[1], paired, notes=notes, alone=alone, **asked)


def runs_of(
    frames: Iterable[pd.DataFrame], side: str, value: str, step: str, notes: list[str]
) -> Iterator[LossRun]:
    """The runs of some frames; what their readers say is added to the notes."""
    frames = list(frames)
    for i, frame in enumerate(frames):
        table = tidy(frame, f"{side}[{i}]", value, step)
        about, table.attrs = table.attrs, {}  # pandas copies them with every selection
        notes += about.get("notes", ())
        rows_of = table.groupby("run", sort=False).indices
        if len(rows_of) > MOST_RUNS:
            raise UsageError(
                f"{about['source']}: {len(rows_of):,} runs; expected at most {MOST_RUNS}: is `run` a column of runs?"
            )
        beside = _series(frame, about["value"], about["step"], about["source"])
        known = {"arm", "run", "step", "value", "time_s"}
        for name, at in rows_of.items():
            own = table.iloc[at]
            series = beside.get(str(name), {})
            settings = {
                column: text.short(text.printable(str(own[column].iloc[0])), 60)
                for column in own.columns.difference([*known, *series])
                if list(own.columns).count(column) == 1 and own[column].astype(str).nunique() == 1
            }
            seed = SEED.search(f"seed{settings['seed']}" if "seed" in settings else str(name))
            is_alone = len(frames) == 1 or name == about["source"]
            yield LossRun(
                str(name) if is_alone else f"{about['source']}:{name}",
                own["step"].to_numpy(float),
                own["value"].to_numpy(float),
                about["last"][name],
                (about["value"], about["step"]),
                own["time_s"].to_numpy(float) if "time_s" in own else None,
                int(seed[1]) if seed else None,
                settings,
                series,
                about.get("unfinished", {}).get(name, ""),
            )


def _series(frame: pd.DataFrame, value: str, step: str, source: str) -> dict[str, dict[str, pd.Series[Any]]]:
    """Columns of numbers beside the loss that change within a run, by run and name; each at the steps that have it."""
    table = frame.rename(columns=str)
    columns = [name for name in table if name not in (value, "run", "arm") and list(table).count(name) == 1]
    if step not in columns:
        return {}
    names = run_names(table, source)
    steps = pd.to_numeric(table[step], errors="coerce")
    found: dict[str, dict[str, pd.Series[Any]]] = {}
    groups = names.groupby(names, sort=False).indices
    for column in columns:
        cells = pd.to_numeric(table[column], errors="coerce")
        written = cells.notna()  # of a text also NaN: an empty cell alone is none
        if column == step or not written.any():
            continue
        if not pd.api.types.is_numeric_dtype(table[column]):
            written |= table[column].astype(str).str.strip().str.lower().isin(NOT_FINITE)
        for run, rows in groups.items():
            at = np.asarray(rows)[written.to_numpy()[rows]]
            series = pd.Series(
                cells.to_numpy(float, na_value=np.nan)[at], index=steps.to_numpy(float, na_value=np.nan)[at]
            )
            series = series[~series.index.duplicated(keep="last") & series.index.notna()].sort_index()
            if series.nunique() > 1:
                found.setdefault(str(run), {})[str(column)] = series
    return found


def _by_seed(side: Sequence[LossRun]) -> dict[int, LossRun]:
    """Runs by seed.

    Raises:
        UsageError: a run has no seed, or one that another has.
    """
    found: dict[int, LossRun] = {}
    for run in side:
        if run.seed is None or run.seed in found:
            wrong = "no seed" if run.seed is None else f"two runs have seed {run.seed}"
            raise UsageError(
                f"paired=seed, {text.printable(run.name)}: {wrong}; expected a column seed, or seedN in the name, of its own"
            )
        found[run.seed] = run
    return found
