"""Workload: what a suite builds from one case and one arm, and the contract that every suite keeps.

A suite declares *work* (FLOPs, bytes) and never speed; the timing engine times only `run`. Everything that
only prepares or checks lies outside of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from harness.store.case import Arm, parse
from harness.store.errors import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from harness.store.case import Case, Scalar


@dataclass(frozen=True, slots=True)
class Numerics:
    """Outcome of the check that precedes timing: the figures, and whether the result may be timed at all."""

    values: Mapping[str, float]  # metric name (in METRICS) -> value
    ok: bool = True
    reason: str = ""  # why not ok: names the figure, the bound and where the bound comes from
    skipped: Mapping[str, str] = field(default_factory=dict)  # metric -> why there is no figure here
    parts: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (metric, part) -> value
    cause: Cause = Cause.NUMERICS  # of a result that is not ok


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why an arm cannot run a case.

    `shape`: no device could (K=100 where FP8 needs multiples of 16). `device`: this machine lacks something. `fault`: the
    suite raised when it was asked, so that nobody knows; such an arm is a failed row, not a skipped one.
    """

    kind: Literal["shape", "device", "fault"]
    reason: str
    cause: Cause = Cause.UNSUPPORTED

    @property
    def status(self) -> Literal["skipped", "failed"]:
        """Status of the arm's row."""
        return "failed" if self.kind == "fault" else "skipped"


@dataclass(slots=True)
class Workload:
    """The closure to time and what is known about it.

    Attributes:
        run: the timed closure; no arguments, result ignored, device work may still be in flight on return.
        check: runs the same computation once on the same operands and compares it with a high-precision
            reference; called before timing, a not-ok result gets no speed.
        flops: floating-point operations of one call by the dtype that each GEMM really ran in ("bf16", "e4m3").
        bytes_moved: logical bytes read and written by one call; None where the count would be a guess.
        resolved: what really runs (recipe, backend, dtypes, `timed`: what one call spans; `evidence`: "refutes" where cases break
            recipes on purpose, so that passing proves nothing, "none" where a figure is recorded and not judged).
        compiled: the first call compiles; the executor times that call apart as `compile_s`.
        variants: closures over other operand sets of the same shapes, for the sustained regime, which rotates
            through them so that no operand stays in cache. Empty: `run` alone is repeated.
        covering: closures that together exceed twice the last cache, made when first asked for: for calls so short that
            several make a sample. Empty: no such number of sets can be had.
        metric: the name of the time that `run` yields.
        on_host: time by the host's clock on every device; `run` then waits for the device itself.
        resident: of a workload that fills the device alone: the context in which `run` may be called. Entering makes
            its memory and puts it into the same state each time, leaving frees it; `run` allocates the rest.
        recompile: of a compiled one: makes the next `run` compile again, so that it is timed with warm caches too.
        tokens: that one call processes; 0 where the word has no meaning.
        split: a point that `run` marks, up to which each of its samples is timed as well, as `split_metric`.
        timer: takes the samples of `run`, a harness.timing.timers.Timer; the same for all arms of a case. None: the device's.
        unmetered: why no meter here knows the energy that `run` takes; "" where one may.
        profile: writes files to the run's folder and gives the figures read from them; None: not asked for.
    """

    run: Callable[[], object]
    check: Callable[[], Numerics]
    flops: Mapping[str, float] = field(default_factory=dict)
    bytes_moved: float | None = None
    resolved: Mapping[str, object] = field(default_factory=dict)
    compiled: bool = False
    variants: Sequence[Callable[[], object]] = ()
    metric: str = "time_ms"
    on_host: bool = False
    resident: Callable[[], AbstractContextManager[object]] | None = None
    recompile: Callable[[], None] | None = None
    tokens: int = 0
    profile: Callable[[Path], Numerics] | None = None
    split: Any = None  # a harness.timing.clock.Split
    covering: Sequence[Callable[[], object]] = ()
    split_metric: str = ""
    timer: Any = None
    unmetered: str = ""

    def held(self) -> AbstractContextManager[object]:
        """The context to call `run` in."""
        return nullcontext() if self.resident is None else self.resident()


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a suite: its meaning and the values that it takes."""

    doc: str
    choices: tuple[Scalar, ...] = ()  # empty: any value of `kind`
    minimum: float = 1  # of a number
    linked: bool = False  # read by the suite's `points` (M, K, N, tokens) and not crossed with the other axes
    kind: Literal["int", "float", "str"] = "int"  # a suite's `points` judges what a text says
    words: tuple[str, ...] = ()  # taken beside the numbers
    default: Scalar = None  # where the sweep leaves the axis open; None: the first of `choices`, if any
    optional: bool = False  # left open it is no part of a case, whose identity it then leaves alone


UNDECLARED = Arm()


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """One arm of a suite.

    Attributes:
        doc: what it is.
        baseline: the arm that it is compared with; "" for a baseline.
        recipe: the recipe that its layers are converted to; "" where none is. `train.mixed_precision` and
            `train.recipe` choose arms by it.
        peer: whose it is: a name of `harness.peers`, "" for ours and the baselines. `peers=` chooses arms by it.
        arm: its record, filled in by `arm_table`; empty where the suite declares none.
        absent: why no machine can run it: the extension that it is of was refused; "" where it was not.
    """

    doc: str
    baseline: str = ""
    recipe: str = ""
    peer: str = ""
    arm: Arm = UNDECLARED
    absent: str = ""

    def record(self, name: str) -> Arm:
        """The record that rows of the arm `name` store; where none was declared, the one that is known by that name."""
        return parse(name) if self.arm == UNDECLARED else self.arm


def arm_table(arms: Mapping[Arm, ArmInfo]) -> dict[str, ArmInfo]:
    """Arms by name, each with its record.

    Raises:
        ValueError: two records have one name. Files keep names, so their rows could not be distinguished.
    """
    table: dict[str, ArmInfo] = {}
    for arm, info in arms.items():
        if (name := str(arm)) in table:
            raise ValueError(
                f"arm {name!r} is declared twice: {table[name].arm} and {arm}; rename the recipe or the variant"
            )
        table[name] = replace(info, arm=arm)
    return table


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of a trial: one sample a step."""

    metric: str
    samples: tuple[float, ...]
    steps: tuple[int, ...]
    part: str = ""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What came of an arm that is a run of its own and no closure to time.

    Attributes:
        series: at least one, unless `failure` or `refusal` says why there is none.
        resolved: what really ran.
        failure: "" where the run is a result, be it a bad one.
        cause: of the failure.
        refusal: why what was to be run refused before it started, which is no failure; "" where it did not.
    """

    series: Sequence[Series]
    resolved: Mapping[str, object] = field(default_factory=dict)
    failure: str = ""
    refusal: str = ""
    cause: Cause = Cause.ERROR


class Plannable(Protocol):
    """What the plan needs of a suite: one module in `harness/suites/` that offers these names."""

    AXES: Mapping[str, Axis]
    ARMS: Mapping[str, ArmInfo]

    def points(
        self, shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
    ) -> list[dict[str, Scalar]]:
        """Linked axis values for named shape sets; `[{}]` for a suite without linked axes."""
        ...

    def unsupported(self, case: Case, arm: str, device: str) -> Unsupported | None:
        """Why this arm can't run this case here, without allocating anything of the case's size."""
        ...

    def work(self, case: Case) -> float:
        """A size (FLOPs or bytes) by which cases are ranked: the largest are measured under sustained load."""
        ...


def runs_alone(suite: Plannable) -> bool:
    """Whether a case of the suite is timed while no other GPU of the machine works: it says so by `ALONE = True`.

    For whole steps under load, whose speed is that of the power and the air that the GPUs of a machine share.
    """
    return bool(getattr(suite, "ALONE", False))


def least_seconds(suite: Plannable, case: Case, arms: Sequence[str], flops_per_s: float) -> float:
    """What a case takes at the least, as far as its suite has a function `least_seconds(case, arms, flops_per_s)`; else 0."""
    own = getattr(suite, "least_seconds", None)
    return 0.0 if own is None else float(own(case, arms, flops_per_s))


def world_of(suite: Plannable, case: Case) -> int:
    """How many ranks, each a process, an arm of the case is: by its axis `ranks`, or by what the suite's `world` says.

    In each of them the suite sees the process group, and does the same; what rank 0 answers counts, of times the slowest rank's.
    """
    own = getattr(suite, "world", None)
    return int(own(case)) if own is not None else int(dict(case.axes).get("ranks") or 1)


def check_request(suite: Plannable, runs: Mapping[Case, Collection[str]], judged: bool) -> bool:
    """Let a suite refuse what shows in the whole request alone, by a function `check_request(runs, judged)` of its own.

    Args:
        suite: that may have one.
        runs: the arms that run, by case; of all shards.
        judged: its rows are to be judged.

    Returns:
        Whether it has one.

    Raises:
        UsageError: the suite refuses.
    """
    check = getattr(suite, "check_request", None)
    if check is not None:
        check(runs, judged)
    return check is not None


@runtime_checkable
class Suite(Plannable, Protocol):
    """A family of workloads that are timed."""

    def build(self, case: Case, arm: str, device: str) -> Workload:
        """Allocates operands from `case.seed` and returns the closure to time."""
        ...


@runtime_checkable
class TrialSuite(Plannable, Protocol):
    """A family of runs: each arm of a case is one, stored when it is finished."""

    def trial(
        self, case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]
    ) -> TrialOutcome:
        """Runs one arm to its end.

        Args:
            case: which.
            arm: which.
            device: "cpu" or "cuda".
            workspace: a folder for this (case, arm) alone. What is left in it is found again when a run that was cut
                off is resumed; it is removed once the rows are stored.
            on_step: called after each step with the steps done and their total.
        """
        ...
