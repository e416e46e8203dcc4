"""MLPerf's public LLM runs: arms, copies, comparisons with equal logged hyperparameters, and pairs of arms that differ in no setting.

The numbers lie in results/published/curves/mlperf, with their sources. The word on a comparison is that of
`harness.judge.verdict.rule.judge`, with arms (machine, stack, round) as clusters; nothing here judges a loss.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import ttest_ind

from harness.judge.verdict import integrity
from harness.judge.verdict.evidence import SIDES, Evidence, LossRun
from harness.judge.verdict.rule import PASS_CONFIDENCE, judge
from harness.judge.verdict.sooner import ratio_to_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from harness.judge.verdict.rule import CurveVerdict
    from harness.store.stats import Effect, Vector, Welch

DATA = Path(__file__).parents[2] / "results" / "published" / "curves" / "mlperf"
HYPERPARAMETERS = (
    "benchmark", "gbs", "seq", "lr", "end_lr", "warmup_steps", "schedule_steps", "target",
)  # fmt: skip
# Settings of precision, each with its levels from the base to the candidate.
LEVELS: Mapping[str, Sequence[str]] = {
    "precision": ("FP8-current", "FP8-delayed", "INT8", "NVFP4>FP8@350", "NVFP4"),
    "fp8_format": ("hybrid", "e4m3"),
    "attention": ("BF16", "FP8"),
    "amax_history": ("1024", "32", "4", "1"),
    "stochastic_rounding": ("on", "off"),
}
FIXED: Mapping[str, Sequence[str]] = {  # settings that agree on both sides where the key is compared
    "precision": (),
    "fp8_format": ("precision",),
    "attention": ("precision", "fp8_format"),
    "amax_history": ("precision", "fp8_format", "attention"),
    "stochastic_rounding": ("precision", "attention"),
}
PRECISION = (*LEVELS, "rht", "quant_2d", "healing_step")
BESIDE = ("rht", "quant_2d", "healing_step", "round", "accelerator", "n_accelerators", "org")
SAID = {
    "rht": "random Hadamard transform",
    "quant_2d": "2D scaling",
    "n_accelerators": "number of accelerators",
    "org": "submitter",
}
UNKNOWN = ("", "unknown")
LEAST_RUNS = 3  # of an arm in a pair of equal arms
SAME = 1.05  # samples within so much of 1 are called equal: less than one cell of the grid of the 8B runs
CHIP = re.compile(r"GB200|GB300|B200|B300|H100|H200-NVL|H200|MI\d+X|TPU-\w+")


@dataclass(frozen=True, eq=False)
class Arm:
    """One machine and stack in one round.

    Attributes:
        about: its row of arms.csv; `accelerator` in its short form.
        runs: those with evaluations.
        samples: to the target, of the runs that reached it.
        seconds: from start to stop, of the same runs.
    """

    about: Mapping[str, str]
    runs: tuple[LossRun, ...]
    samples: Vector
    seconds: Vector

    @property
    def name(self) -> str:
        """Its id."""
        return self.about["arm_id"]

    @property
    def cell(self) -> float:
        """The distance of two evaluations in samples."""
        return float(self.about["eval_step"])

    @property
    def machine(self) -> str:
        """Accelerators by number and kind."""
        return f"{self.about['n_accelerators']} {self.about['accelerator']}"

    def values(self, names: Iterable[str]) -> tuple[str, ...]:
        """Its settings of these names."""
        return tuple(self.about[name] for name in names)


@dataclass(frozen=True, slots=True)
class Reference:
    """Samples to the target of a reference convergence point: no curves."""

    name: str
    precision: str
    samples: Vector


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two sides with equal logged hyperparameters.

    Attributes:
        factor: the setting in which the sides differ: a key of `LEVELS`, or "reference".
        base: arms, or a reference point.
        candidate: arms.
        between: sd between machines as a share of the loss, for sides of one arm each.
    """

    factor: str
    base: tuple[Arm, ...] | Reference
    candidate: tuple[Arm, ...]
    between: float = 0.0

    @property
    def sides(self) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
        """Arms of both sides; none for a reference point."""
        return (() if isinstance(self.base, Reference) else self.base), self.candidate

    @property
    def about(self) -> Mapping[str, str]:
        """The settings that all arms share."""
        return self.candidate[0].about

    @cached_property
    def compared(self) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
        """Arms whose losses are compared: those of the commonest evaluation grid, where both sides have it."""
        base, candidate = self.sides
        grids = Counter(arm.cell for arm in (*base, *candidate))
        both = {arm.cell for arm in base} & {arm.cell for arm in candidate}
        if not both:
            return base, candidate
        grid = max(both, key=lambda cell: (grids[cell], -cell))
        return tuple(a for a in base if a.cell == grid), tuple(a for a in candidate if a.cell == grid)

    @cached_property
    def verdict(self) -> CurveVerdict | None:
        """By the one rule, arms as clusters; None for a reference point."""
        base, candidate = ([run for arm in side for run in arm.runs] for side in self.compared)
        if not base:
            return None
        one_each = all(len(side) == 1 for side in self.compared)
        return judge(
            Evidence(
                base,
                candidate,
                target=float(self.about["target"]),
                cluster="arm",
                between=self.between if one_each else 0.0,
            )
        )

    @property
    def ways(self) -> tuple[Welch, ...]:
        """The gap over runs and, where a side has two arms, over arms; none where the comparison was refused."""
        found = self.verdict
        if found is None or found.course is None or math.isnan(found.gap):
            return ()
        return found.course.end.ways

    @property
    def farthest(self) -> str:
        """The run whose end lies farthest from its side's median."""
        assert self.verdict is not None
        assert self.verdict.course is not None
        runs = self.verdict.evidence.sides
        off = [np.abs(side - np.median(side)) for side in self.verdict.course.end.figures]
        side = int(off[1].max() > off[0].max())
        return runs[side][int(off[side].argmax())].name

    @property
    def within(self) -> float:
        """The margin inside which the gap lies with the confidence of a PASS, a share; NaN where none was compared."""
        if not self.ways or self.verdict is None or self.verdict.course is None:
            return math.nan
        return max(map(abs, self.verdict.course.end.interval(PASS_CONFIDENCE)))

    @property
    def to_target(self) -> tuple[Vector, Vector]:
        """Samples to the target of the runs of both sides."""
        base, candidate = self.sides
        first = self.base.samples if isinstance(self.base, Reference) else _joined(base, "samples")
        return first, _joined(candidate, "samples")

    @property
    def one_value(self) -> bool:
        """Whether all runs of a side reach the target at one evaluation: the grid then says no more than its cell."""
        return any(np.unique(side).size == 1 for side in self.to_target)

    @cached_property
    def samples(self) -> tuple[Effect, Effect]:
        """Samples to the target, candidate over base: over runs, and with arms as clusters."""
        base, candidate = self.sides
        first, second = self.to_target
        cell = max(arm.cell for arm in (*base, *candidate))
        labels = (
            ["reference"] * first.size if isinstance(self.base, Reference) else _labels(base),
            _labels(candidate),
        )
        return (
            ratio_to_target(first.tolist(), second.tolist(), cell),
            ratio_to_target(first.tolist(), second.tolist(), cell, labels),
        )

    @cached_property
    def times(self) -> list[tuple[str, list[Arm], list[Arm], Effect]]:
        """(machine, arms of the base, of the candidate, seconds to the target): of each machine that both sides used."""
        machines = [{arm.machine for arm in side} for side in self.sides]
        found = []
        for machine in sorted(machines[0] & machines[1]):
            base, candidate = ([arm for arm in side if arm.machine == machine] for side in self.sides)
            seconds = [_joined(side, "seconds") for side in (base, candidate)]
            pace = np.concatenate(seconds) / _joined((*base, *candidate), "samples")
            cell = max(arm.cell for arm in (*base, *candidate)) * float(
                pace.mean()
            )  # the grid rounds seconds too
            labels = _labels(base), _labels(candidate)
            effect = ratio_to_target(seconds[0].tolist(), seconds[1].tolist(), cell, labels)
            found.append((machine, base, candidate, effect))
        return found

    def differs(self) -> list[str]:
        """What else differs than the factor, each as "NAME BASE against CANDIDATE"; what one side alone has, as "NAME VALUE in it"."""
        if isinstance(self.base, Reference):
            return []
        lines = []
        for name in (*(n for n in LEVELS if n != self.factor), *BESIDE):
            sides = [sorted({arm.about[name] or "not known" for arm in side}) for side in self.sides]
            if sides[0] == sides[1]:
                continue
            said = SAID.get(name, name.replace("_", " "))
            if ["not known"] not in sides:
                lines.append(f"{said} {' against '.join(map(_few, sides))}")
            elif name not in ("fp8_format", "amax_history"):  # of NVFP4 and of current scaling there is none
                known = next(i for i in (0, 1) if sides[i] != ["not known"])
                lines.append(f"{said} {_few(sides[known])} in the {SIDES[known]}")
        return lines


def _few(values: Sequence[str]) -> str:
    return "|".join(values) if len(values) <= 4 else f"{len(values)} kinds"


def _joined(arms: Sequence[Arm], name: str) -> Vector:
    return np.concatenate([getattr(arm, name) for arm in arms])


def _labels(arms: Sequence[Arm]) -> list[str]:
    return [arm.name for arm in arms for _ in arm.samples]


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def arms() -> dict[str, Arm]:
    """Every arm, by its id."""
    evaluations, runs = defaultdict(list), defaultdict(list)
    for row in _rows("evals"):
        evaluations[row["arm_id"], row["run"]].append(
            (float(row["samples"]), float(row["value"]), float(row["seconds"]))
        )
    for row in _rows("runs"):
        runs[row["arm_id"]].append(row)
    made = {}
    for about in _rows("arms"):
        name = about["arm_id"]
        chip = CHIP.search(about["accelerator"])
        curves = []
        for row in runs[name]:
            if (name, row["run"]) in evaluations:
                steps, values, seconds = np.array(evaluations[name, row["run"]]).T
                # No seed: arms may share one, which is no fault; copies are found by their curves.
                curve = LossRun(
                    f"{name}-{row['run']}", steps, values, float(steps[-1]), ("loss", "samples"), seconds,
                    settings={"arm": name},
                )  # fmt: skip
                curves.append(curve)
        ended = [row for row in runs[name] if row["samples_to_target"]]
        figures = ([float(row[column]) for row in ended] for column in ("samples_to_target", "seconds"))
        short = {"accelerator": chip[0] if chip else about["accelerator"]}
        made[name] = Arm(about | short, tuple(curves), *map(np.array, figures))
    return made


@cache
def copies() -> dict[str, tuple[str, str]]:
    """Arms that are another arm's runs, submitted again: by id the other one, and what the judge says of them.

    Only arms of which some run begins with another's three values are shown to the judge; the pairs of equal arms are all
    judged in full, and none of them is a copy then (`calibration`).
    """
    starts = defaultdict(set)
    for arm in arms().values():
        for run in arm.runs:
            if run.values.size >= integrity.MIN_VALUES:
                starts[tuple(run.values[: integrity.MIN_VALUES])].add(arm.name)
    pairs = {pair for names in starts.values() for pair in itertools.combinations(sorted(names), 2)}
    found = {}
    for pair in sorted(pairs):
        first, again = sorted((arms()[name] for name in pair), key=lambda arm: (arm.about["round"], arm.name))
        evidence = Evidence(first.runs, again.runs)
        if integrity.enough(evidence) and (finding := next(integrity.copies(evidence), None)):
            found[again.name] = first.name, finding.text
    return found


def kept() -> list[Arm]:
    """Arms without copies."""
    return [arm for arm in arms().values() if arm.name not in copies()]


def _groups(names: Sequence[str], of: Iterable[Arm]) -> dict[tuple[str, ...], list[Arm]]:
    groups = defaultdict(list)
    for arm in of:
        groups[arm.values(names)].append(arm)
    return dict(sorted(groups.items()))


def references() -> Iterator[Comparison]:
    """Each precision against the reference point of its round with the same batch, rate and warm-up, where that is given."""
    points = _rows("rcps")
    for key, group in _groups((*HYPERPARAMETERS, "precision", "fp8_format", "attention"), kept()).items():
        about = dict(zip(HYPERPARAMETERS, key[:-3], strict=True))
        by_point = defaultdict(list)
        for arm in group:
            if point := next((p for p in points if _is_reference(p, about, arm)), None):
                by_point[point["id"], point["samples_to_target"]].append(arm)
        for (name, samples), own in by_point.items():
            same = [p for p in points if (p["id"], p["samples_to_target"]) == (name, samples)]
            precision = "BF16" if any(p["precision"] == "BF16" for p in same) else "not given"
            reference = Reference(name, precision, np.array([float(n) for n in samples.split()]))
            yield Comparison("reference", reference, tuple(own))


def _is_reference(point: Mapping[str, str], about: Mapping[str, str], arm: Arm) -> bool:
    """Whether a point has an arm's hyperparameters, as far as both give them."""
    if (point["benchmark"], point["round"]) != (about["benchmark"], f"{arm.about['round'][1:]}.0"):
        return False
    if point["gbs"] != about["gbs"] or float(point["lr"]) != float(about["lr"]):
        return False
    steps = re.search(r"max_steps=(\d+)", point["other_hyperparams"])
    if steps and steps[1] != about["schedule_steps"]:
        return False
    times = float(about["gbs"]) if point["warmup_unit"] == "samples" else 1.0
    return not point["warmup"] or float(point["warmup"]) == float(about["warmup_steps"]) * times


def curve_comparisons(between: Mapping[str, float]) -> Iterator[Comparison]:
    """Arms of one level of a precision setting against those of a later one, all hyperparameters and `FIXED` settings equal."""
    for factor, levels in LEVELS.items():
        for key, group in _groups((*HYPERPARAMETERS, *FIXED[factor]), kept()).items():
            if any(value in UNKNOWN for value in key[len(HYPERPARAMETERS) :]):
                continue
            by_level = {level: [arm for arm in group if arm.about[factor] == level] for level in levels}
            held = [level for level in levels if by_level[level]]
            for base, candidate in itertools.combinations(held, 2):
                yield Comparison(
                    factor, tuple(by_level[base]), tuple(by_level[candidate]), between.get(key[0], 0.0)
                )


@dataclass(slots=True)
class Calibration:
    """Pairs of arms that differ in no logged setting, each judged in both directions.

    Attributes:
        benchmark: whose; "all" of all.
        pairs: of arms.
        welch: pairs in which a 5 % Welch test of the last common value rejects, of `tested`.
        tested: pairs with a common value.
        words: of the rule, over directions.
        codes: of the rule, over directions.
        within: directions whose gap alone passes.
        withheld: of these, kept from PASS by another rule.
        gaps: of each pair, the absolute gap at the last common value, a share, and the names of both.
        excess: of each pair, squared gap less its squared standard error.
    """

    benchmark: str
    pairs: int = 0
    welch: int = 0
    tested: int = 0
    words: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    within: int = 0
    withheld: int = 0
    gaps: list[tuple[float, str]] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)

    @property
    def between(self) -> float:
        """Standard deviation between machines as a share of the loss: half the mean excess, its root."""
        return math.sqrt(max(float(np.mean(self.excess)) / 2, 0.0)) if self.excess else math.nan


def equal_pairs() -> list[tuple[Arm, Arm]]:
    """Pairs of arms with at least `LEAST_RUNS` runs that differ in no hyperparameter and no precision setting."""
    enough = [arm for arm in kept() if len(arm.runs) >= LEAST_RUNS]
    groups = _groups((*HYPERPARAMETERS, *PRECISION), enough)
    return [pair for group in groups.values() for pair in itertools.combinations(group, 2)]


def last_common(one: Arm, other: Arm) -> tuple[Vector, Vector] | None:
    """Losses at the last evaluation that every run of both has."""
    steps, losses = Evidence(one.runs, other.runs).common
    return (losses[: len(one.runs), -1], losses[len(one.runs) :, -1]) if steps.size else None


def spreads() -> dict[str, Calibration]:
    """By benchmark, Welch's test of equal arms and the spread between machines; without the rule, hence quick."""
    found = defaultdict(list)
    for one, other in equal_pairs():
        found[one.about["benchmark"]].append((one, other))
    made = {}
    for benchmark, pairs in sorted(found.items()):
        made[benchmark] = own = Calibration(benchmark, len(pairs))
        for one, other in pairs:
            if (last := last_common(one, other)) is None:
                continue
            level = float(np.median(last[0]))
            own.tested += 1
            own.welch += bool(ttest_ind(*last, equal_var=False).pvalue < 0.05)
            error = sum(x.var(ddof=1) / x.size for x in last) / level**2
            gap = abs(float(last[1].mean() - last[0].mean())) / level
            own.gaps.append((gap, f"{one.name} and {other.name}"))
            own.excess.append(gap**2 - float(error))
    return made


@cache
def calibration() -> list[Calibration]:
    """By benchmark, then of all: the rule on every pair of equal arms, in both directions; half a minute."""
    found = spreads()
    for one, other in equal_pairs():
        own = found[one.about["benchmark"]]
        for base, candidate in ((one, other), (other, one)):
            seen = judge(
                Evidence(base.runs, candidate.runs, target=float(one.about["target"]), cluster="arm")
            )
            own.words[seen.outcome] += 1
            own.codes.update(seen.codes)
            if seen.course is not None:
                low, high = seen.course.end.interval(PASS_CONFIDENCE)
                is_within = -seen.margin < low and high < seen.margin
                own.within += is_within
                own.withheld += is_within and seen.outcome != "PASS"
    every = Calibration("all")
    for own in found.values():
        for name in ("pairs", "welch", "tested", "words", "codes", "within", "withheld", "gaps", "excess"):
            setattr(every, name, getattr(every, name) + getattr(own, name))
    return [*found.values(), every]
