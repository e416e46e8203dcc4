"""Plan: from a composed command line to the cases and arms that will be measured.

Everything that can be refused is refused here, before a folder is made or a tensor is allocated.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output
from harness.store.case import LOCAL, Case, Scalar, expand
from harness.store.errors import Cause, UsageError, cause_of, one_line, unknown
from harness.suites import NAMES
from harness.timing.workload import TrialSuite, Unsupported, check_request

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from harness.engine.settings import PartConfig, SweepConfig, TrainConfig
    from harness.store.case import Case
    from harness.timing.workload import ArmInfo, Axis, Plannable


@contextmanager
def refusing(name: str, suite: object, what: str) -> Iterator[None]:
    """Turn what a suite raises into a UsageError that names it; an error of our own suites stays what it is.

    Args:
        name: of the suite.
        suite: what is called within.
        what: the function that is called.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        if _is_ours(suite) and not isinstance(error, SystemExit):
            raise
        raise UsageError(
            f"suite {name}: {what}() raised {one_line(error)}; expected it to return, or to raise ValueError for a value "
            "that it cannot take"
        ) from error


def _is_ours(suite: object) -> bool:
    module = suite.__name__ if isinstance(suite, ModuleType) else type(suite).__module__
    return module.startswith("harness.")


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do.

    Attributes:
        planned: the case.
        arm: of a trial suite, the arm whose run this is; "" where the case is timed, all arms at once.
        workspace: where a run may keep checkpoints; None where the case is timed.
        sustained: time the case under sustained load as well.
    """

    planned: PlannedCase
    arm: str = ""
    workspace: Path | None = None
    sustained: bool = False

    @property
    def case(self) -> Case:
        """The case, without what was planned for it."""
        return self.planned.case

    def __str__(self) -> str:
        return f"{self.case} {self.arm}".rstrip()


AXIS_KEYS = (
    "model",
    "data",
    "data_path",
    "ceilings",
    "schedule",
    "ranks",
)  # keys of a command line that are short for an axis
TELL_S = 2.0  # between two words on a plan that takes long
PROFILE_KEYS = ("profile", "profile_start", "profile_end")  # likewise, below `train.`


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case, the arms that run, and those that cannot, each with its reason."""

    part: str
    suite: Plannable
    case: Case
    arms: tuple[str, ...]
    unsupported: Mapping[str, Unsupported] = field(default_factory=dict)

    @property
    def runnable(self) -> tuple[str, ...]:
        """The arms that this device can run."""
        return tuple(arm for arm in self.arms if arm not in self.unsupported)

    @property
    def is_trial(self) -> bool:
        """Whether each arm is a run of its own."""
        return isinstance(self.suite, TrialSuite)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All cases of a command line, and the product of axes behind each part; of a shard, its own and those elsewhere."""

    cases: tuple[PlannedCase, ...]
    products: Mapping[str, str]
    elsewhere: tuple[PlannedCase, ...] = ()

    def tasks(
        self, done: Collection[str] = (), done_arms: Collection[tuple[str, str]] = ()
    ) -> Iterator[Task]:
        """What there is to do: each case that is timed, and each run of a trial suite.

        Args:
            done: ids of the cases that need nothing.
            done_arms: (case id, arm) of the runs that need nothing.
        """
        for planned in self.cases:
            if planned.case.case_id in done:
                continue
            arms = planned.runnable if planned.is_trial else ("",)
            yield from (Task(planned, arm) for arm in arms if (planned.case.case_id, arm) not in done_arms)

    def headline(self, most: int) -> set[str]:
        """Ids of the cases with the most work: those measured under sustained load as well."""
        runnable = [c for c in (*self.cases, *self.elsewhere) if c.runnable]
        ranked = sorted(runnable, key=lambda c: c.suite.work(c.case), reverse=True)
        return {c.case.case_id for c in ranked[:most]}


def make_plan(config: SweepConfig, suites: Mapping[str, Plannable]) -> SweepPlan:
    """Expands a composed configuration.

    Args:
        config: settings, device resolved.
        suites: the table of suites by name.

    Raises:
        UsageError: unknown suite, axis, arm, case or shape set; a value out of range; a shape that a requested arm can
            never run when it was asked for by number; only arms that this device can't run; too little for a verdict.
    """
    parts = _shared_out(config, _parts(config, suites))
    _spread_keys(config, parts)
    _choose_peers(config.peers, parts, suites)
    recipe = _choose_arms(config.train, parts)
    cases: list[PlannedCase] = []
    products: dict[str, str] = {}
    for part in parts:
        planned, products[part.name] = _plan_part(part, config)
        cases += planned
    cases = _chosen(cases, config.cases)
    if recipe is not None:
        _refuse_high_precision_alone(recipe, cases)
    if not any(c.runnable for c in cases):
        raise UsageError(_nothing_runs(cases, str(config.device)))
    _check_requests(config, cases)
    return SweepPlan(tuple(cases), products)


@dataclass(slots=True)
class _Part:
    """A part of a sweep, whose keys are settled one after the other; no arms: all of the suite."""

    name: str
    suite: Plannable
    suite_name: str
    axes: dict[str, Any]
    shapes: list[str]
    arms: list[str]


def _choose_peers(
    names: Sequence[str] | None, parts: Sequence[_Part], suites: Mapping[str, Plannable]
) -> None:
    """Leaves out the arms of the peers that are not named; None names all."""
    if names is None:
        return
    # Not of every suite: one that another package brings, and that this sweep does not use, may fail to be imported.
    used = {part.suite_name for part in parts} | {name for name in suites if name in NAMES}
    known = {info.peer for name in used for info in suites[name].ARMS.values() if info.peer}
    for name in names:
        if name not in known:
            raise unknown("peer", name, known)
    for part in parts:
        arms = part.suite.ARMS
        part.arms = [a for a in part.arms or arms if a not in arms or arms[a].peer in ("", *names)]


def _check_requests(config: SweepConfig, cases: Sequence[PlannedCase]) -> None:
    """Let each suite see all that is asked of it; `train.judge=false` asks for no verdict."""
    judge = config.train.judge
    runs: dict[str, dict[Case, set[str]]] = {}  # by suite: parts may share out the seeds of one set-up
    suites = {planned.case.suite: planned.suite for planned in cases}
    for planned in cases:
        runs.setdefault(planned.case.suite, {}).setdefault(planned.case, set()).update(planned.runnable)
    checked = []
    for name, own in runs.items():
        with refusing(name, suites[name], "check_request"):
            checked.append(check_request(suites[name], own, judge is not False))
    if judge is not None and not any(checked):
        raise UsageError(
            f"train.judge={judge} means nothing to sweep {config.name!r}: no suite of it has a verdict"
        )


def _chosen(cases: list[PlannedCase], ids: Sequence[str]) -> list[PlannedCase]:
    """The cases with these ids, or all if none is named."""
    known = {c.case.case_id for c in cases}
    for name in ids:
        if name not in known:
            raise UsageError(
                f"no case {name!r} in this sweep with these axes on this device; dry_run=true lists all"
            )
    return [c for c in cases if c.case.case_id in ids] if ids else cases


def _parts(config: SweepConfig, suites: Mapping[str, Plannable]) -> list[_Part]:
    """The parts of a sweep; a sweep that names one suite is its own single part."""
    named: Mapping[str, PartConfig | SweepConfig] = config.parts
    if not named:
        if not config.suite:
            raise UsageError(f"sweep {config.name!r} names neither a suite nor parts")
        named = {config.suite: config}
    parts = []
    for name, part in named.items():
        suite, shapes = part.suite, part.shapes
        if suite in ("???", None):
            raise unknown("part", name, (n for n, p in named.items() if p.suite not in ("???", None)))
        if suite not in suites:
            raise unknown("suite", str(suite), suites)
        sets = [shapes] if isinstance(shapes, str) else list(shapes)
        parts.append(_Part(str(name), suites[suite], suite, dict(part.axes), sets, list(part.arms)))
    return parts


def _shared_out(config: SweepConfig, parts: list[_Part]) -> list[_Part]:
    """Hands sweep-wide axes and arms to the parts that know them, and refuses those that no part knows."""
    if not config.parts:
        return parts
    for key in ("suite", "shapes"):
        if getattr(config, key):
            raise UsageError(
                f"sweep {config.name!r} is made of parts; write parts.{parts[0].name}.{key}={getattr(config, key)}"
            )
    for axis, values in config.axes.items():
        takers = [part for part in parts if axis in part.suite.AXES]
        if not takers:
            raise unknown("axis", axis, {axis for part in parts for axis in part.suite.AXES})
        for part in takers:
            part.axes[axis] = values
    for arm in config.arms:
        if not any(arm in part.suite.ARMS for part in parts):
            raise unknown("arm", arm, {arm for part in parts for arm in part.suite.ARMS})
    if config.arms:
        for part in parts:
            part.arms = [arm for arm in config.arms if arm in part.suite.ARMS]
        return [part for part in parts if part.arms]
    return parts


def _spread_keys(config: SweepConfig, parts: Sequence[_Part]) -> None:
    """Hands the keys that are short for an axis (`model=nano`) to the parts whose suites have it."""
    given = {key: (key, getattr(config, key)) for key in AXIS_KEYS}
    given |= {key: (f"train.{key}", getattr(config.train, key)) for key in PROFILE_KEYS}
    for axis, (key, value) in given.items():
        takers = [part for part in parts if axis in part.suite.AXES]
        read = axis == "model" and any("from_model" in part.shapes for part in parts)
        if value is None or (read and not takers):
            continue
        if not takers:
            raise UsageError(
                f"{key}={value} means nothing to sweep {config.name!r}: no suite of it has an axis {axis!r}"
            )
        if isinstance(value, dict):
            value = json.dumps(value, sort_keys=True, separators=(",", ":"))
        for part in takers:
            part.axes[axis] = value


def _choose_arms(train: TrainConfig, parts: Sequence[_Part]) -> str | None:
    """What `train.mixed_precision` and `train.recipe` leave of the arms; the name of the recipe if it is FP8.

    bf16 keeps the arms without FP8; fp8 those and the ones of the recipe. Arms of recipe "any" go with every recipe.
    """
    text, named = train.mixed_precision, train.recipe
    if text is None and named is None:
        return None
    from harness.training.setup import mixed_precision  # torch

    recipe = None if text is None else mixed_precision(text, named or "tensorwise")
    if recipe is None and named is not None:
        other = "" if text is None else f", not {text}"
        raise UsageError(f"train.recipe={named} needs train.mixed_precision=fp8{other}")
    wanted = {""} if recipe is None else {"", "any", recipe.name}
    by_recipe = [part for part in parts if any(arm.recipe for arm in part.suite.ARMS.values())]
    if not by_recipe:
        raise UsageError(
            f"train.mixed_precision={text}: no suite of this sweep has arms by recipe; write arms=[...]"
        )
    for part in by_recipe:
        known: Mapping[str, ArmInfo] = part.suite.ARMS
        asked = [arm for arm in part.arms or known if arm in known]
        left = [arm for arm in asked if known[arm].recipe in wanted]
        if recipe is not None and not any(known[arm].recipe == recipe.name for arm in left):
            left += [arm for arm in known if known[arm].recipe == recipe.name]  # left out by default
        if not left:
            raise UsageError(f"train.mixed_precision={text} leaves none of the arms {', '.join(asked)}")
        part.arms = left
    return None if recipe is None else recipe.name


def _refuse_high_precision_alone(recipe: str, cases: Sequence[PlannedCase]) -> None:
    """FP8 was asked for by name; a run in which only bf16 can run would answer another question."""
    ours = [(c, arm) for c in cases for arm in c.arms if c.suite.ARMS[arm].recipe == recipe]
    if ours and not any(arm in c.runnable for c, arm in ours):
        case, arm = ours[0]
        raise UsageError(f"train.recipe={recipe} cannot run here: {case.unsupported[arm].reason}")


def _plan_part(part: _Part, config: SweepConfig) -> tuple[list[PlannedCase], str]:
    suite, shapes, device = part.suite, part.shapes, str(config.device)
    axes = {
        axis: _axis_values(axis, values, suite.AXES)
        for axis, values in part.axes.items()
        if values is not None
    }
    arms = tuple(dict.fromkeys(part.arms)) or tuple(
        suite.ARMS
    )  # a row a metric, however often an arm is named
    for arm in arms:
        if arm not in suite.ARMS:
            raise unknown("arm", arm, suite.ARMS)
    with refusing(part.suite_name, suite, "points"):
        try:
            points = suite.points(shapes, axes, config.model)
        except ValueError as error:
            raise UsageError(f"part {part.name}: {error}") from error
    crossed = {axis: values for axis, values in axes.items() if not suite.AXES[axis].linked}
    cases = expand(part.suite_name, crossed, points, int(config.seed))
    by_number = any(axes.get(axis) for axis in ("M", "K", "N") if suite.AXES.get(axis))
    planned, reported_at = [], time.monotonic()
    for number, case in enumerate(cases):
        if time.monotonic() - reported_at > TELL_S:
            raw_output.notify(f"planned {number} of {len(cases)} cases of {part.name}\n")
            reported_at = time.monotonic()
        reasons = {arm: why for arm in arms if (why := _unsupported(suite, case, arm, device))}
        for arm, why in reasons.items():
            if why.kind == "shape" and by_number:
                raise UsageError(f"{case}, arm {arm}: {why.reason}")
        planned.append(PlannedCase(part.name, suite, case, arms, reasons))
    factors = ([str(len(points))] if len(points) > 1 else []) + [str(len(v)) for v in crossed.values()]
    product = f"{' x '.join(factors) or '1'} = {len(cases)} cases x {len(arms)} arms"
    if by_number and (replaced := [*shapes, *(["axes.tokens"] if axes.get("tokens") else [])]):
        product += f" (axes.M, K and N are given: {', '.join(replaced)} not read)"
    return planned, product


def _unsupported(suite: Plannable, case: Case, arm: str, device: str) -> Unsupported | None:
    """Why an arm can't run a case; what a suite raises over this question fails that arm alone."""
    if absent := suite.ARMS[arm].absent:
        return Unsupported("device", absent, Cause.MISSING)
    try:
        return suite.unsupported(case, arm, device)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a peer's library may raise anything when it is asked
        if (cause := cause_of(error, Cause.ERROR)) is Cause.MISSING:
            return Unsupported("device", one_line(error), cause)
        reason = f"could not tell whether it can run here: {one_line(error)}"
        return Unsupported("fault", reason, Cause.ERROR)


def _axis_values(axis: str, values: object, known: Mapping[str, Axis]) -> list[Scalar]:
    if axis not in known:
        raise unknown("axis", axis, known)
    given: list[Any] = list(values) if isinstance(values, list | tuple) else [values]
    if not given:
        raise UsageError(f"axes.{axis} is empty; expected {_expectation(known[axis])}")
    for value in given:
        spec = known[axis]
        if not _fits(spec, value):
            raise UsageError(f"axes.{axis}={value!r}: expected {_expectation(spec)} ({spec.doc})")
    if axis in LOCAL and len(given) > 1:
        raise UsageError(
            f"axes.{axis} has {len(given)} values; it does not distinguish cases, so give one value and start a run for each"
        )
    is_float = known[axis].kind == "float"
    return [float(value) if is_float and value not in known[axis].words else value for value in given]


def _fits(axis: Axis, value: object) -> bool:
    if axis.choices:
        return value in axis.choices
    if value in axis.words:
        return True
    if axis.kind == "str":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if axis.kind == "int" else int | float):
        return False
    return math.isfinite(value) and value >= axis.minimum


def _expectation(axis: Axis) -> str:
    if axis.choices:
        return "one of " + ", ".join(map(str, axis.choices))
    if axis.kind == "str":
        return "a text"
    words = "".join(f", or {word}" for word in axis.words)
    return f"{'an integer' if axis.kind == 'int' else 'a number'} of at least {axis.minimum:g}{words}"


def _nothing_runs(cases: list[PlannedCase], device: str) -> str:
    reasons = Counter(f"{arm}: {why.reason}" for c in cases for arm, why in c.unsupported.items())
    if not reasons:
        return "no cases: the axes expand to nothing"
    shown = "; ".join(reason for reason, _ in reasons.most_common(3))
    return f"none of the arms asked for can run on this device ({device}): {shown}"


def describe(plan: SweepPlan) -> Iterator[str]:
    """The lines that `dry_run=true` prints: each product, what all its cases share, and of every case the rest."""
    for part, product in plan.products.items():
        yield f"{part}: {product}"
        described = {c.case.case_id: _described(c) for c in plan.cases if c.part == part}
        shared = set.intersection(*map(set, described.values())) if len(described) > 1 else set()
        if shared:
            yield "  each: " + " ".join(word for word in next(iter(described.values())) if word in shared)
        for case, words in described.items():
            yield " ".join((f"  {case}", *(word for word in words if word not in shared)))
    yield from nothing_compared(plan)
    others = f", {len(plan.elsewhere)} in other shards" if plan.elsewhere else ""
    yield f"{len(plan.cases)} cases in all{others}; nothing was measured (dry_run=true)"


def nothing_compared(plan: SweepPlan) -> Iterator[str]:
    """A line where no arm stands beside the one that it is compared with, though the suites have such arms."""
    cases = (*plan.cases, *plan.elsewhere)
    pairs = [(c.suite.ARMS[arm].baseline, c.runnable) for c in cases for arm in c.runnable]
    if any(info.baseline for c in cases for info in c.suite.ARMS.values()) and not any(
        baseline in beside for baseline, beside in pairs
    ):
        arms = ", ".join(dict.fromkeys(arm for c in cases for arm in c.runnable))
        yield f"nothing is compared: {arms} without the arm that it is compared with; list arms SUITE names them"


def _described(planned: PlannedCase) -> list[str]:
    """What is to be said of a case, in words that cases may share: its axes, its arms, and those that it leaves out."""
    axes = [f"{name}={value}" for name, value in planned.case.shared.items()]
    skipped = [f"\n      {arm} {why.status}: {why.reason}" for arm, why in planned.unsupported.items()]
    return [*axes, f"arms={','.join(planned.runnable)}", *skipped]
