"""Executor: runs a plan, case by case, and turns everything that happens into rows.

Within a case the order is fixed: build every arm, compile (timed apart), check the numerics, and only then
time the arms that are right, interleaved. An arm that cannot be built, is wrong, or recompiles while it is
timed ends as a `failed` row with its reason; the other arms go on.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness import compiling, environment, store
from harness.errors import UsageError, one_line
from harness.measurement import Measurement
from harness.timers import release_memory
from harness.timing import Timer, Timing, TimingConfig, measure, measure_sustained, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from harness.plan import Plan, PlannedCase
    from harness.workload import Numerics, Workload

BUDGET = "time budget"  # a skipped row whose reason starts with this is run by resume=
LOST = "the device was lost"  # likewise a failed one
AGAIN = ":again"  # a baseline timed a second time in the same rounds


@dataclass(slots=True)
class Outcome:
    """How a run ended: rows by status, and the state that is recorded with it."""

    state: str
    statuses: Counter[str] = field(default_factory=Counter)
    message: str = ""
    reasons: list[str] = field(default_factory=list)  # distinct reasons of the failed rows, in order


@dataclass(slots=True)
class _Arm:
    """One arm of the case under way."""

    name: str
    baseline: str
    workload: Workload
    resolved: dict[str, object]


@dataclass(slots=True)
class Executor:
    """Runs the cases of a plan on one device, in this process.

    Attributes:
        device: "cpu" or "cuda".
        timer: how one block of calls is timed.
        timing: warm-up, rounds and stop rule.
        seed: of the order of the arms within the rounds.
        control: time each baseline twice (A/A).
        monitor: reads clocks, power and throttling of the GPU; None on a CPU.
        budget_s: start no case after this many seconds.
        on_case: told of each case before it starts.
        clock: seconds; injectable for tests.
    """

    device: str
    timer: Timer
    timing: TimingConfig
    seed: int = 0
    control: bool = True
    monitor: Any = None
    budget_s: float | None = None
    on_case: Callable[[PlannedCase], None] = lambda planned: None
    clock: Callable[[], float] = time.perf_counter

    def run(self, plan: Plan, writer: store.RunWriter, done: Iterable[str] = ()) -> Outcome:
        """Measures every case that is not in `done`; a case's rows are durable before the next one starts.

        Ctrl-C and a refusing disk end the run, never with rows lost: the outcome's state says which it was.
        """
        outcome = Outcome("finished")
        finished = set(done)
        headline = plan.headline(self.timing.sustained_max_cases) if self.device == "cuda" else set()
        started = self.clock()
        lost = ""
        try:
            for planned in plan.cases:
                if planned.case.case_id in finished:
                    continue
                self.on_case(planned)
                if lost:
                    rows = _all_arms(planned, "failed", lost)
                elif self.budget_s is not None and self.clock() - started > self.budget_s:
                    why = f"{BUDGET} of {self.budget_s:g} s was spent before this case; resume=RUN_ID runs it"
                    rows = _all_arms(planned, "skipped", why)
                else:
                    rows = self._rows_of(planned, sustained=planned.case.case_id in headline)
                    lost = self._device_lost(planned)
                try:
                    writer.append(rows)
                except OSError as error:
                    outcome.state = "failed"
                    outcome.message = (
                        f"could not write to {writer.folder}: {error.strerror}; the earlier rows are intact"
                    )
                    break
                outcome.statuses.update(row.status for row in rows)
                failed = (f"{planned.case}, {r.arm}: {r.reason}" for r in rows if r.status == "failed")
                outcome.reasons += [reason for reason in failed if reason not in outcome.reasons]
        except KeyboardInterrupt:
            outcome.state = "interrupted"
            outcome.message = "interrupted; the finished cases are stored"
        return outcome

    def _rows_of(self, planned: PlannedCase, *, sustained: bool) -> list[Measurement]:
        """The rows of a case; a fault outside of any one arm (a suite's bug, a dead device) fails all its arms."""
        try:
            return self.measure_case(planned, sustained=sustained)
        except Exception as error:  # noqa: BLE001 - the other cases of the sweep go on
            return _all_arms(planned, "failed", one_line(error))

    def measure_case(self, planned: PlannedCase, *, sustained: bool = False) -> list[Measurement]:
        """All rows of one case."""
        rows = [_row(planned, arm, "skipped", reason=why.reason) for arm, why in planned.unsupported.items()]
        compiling.reset()
        if self.device == "cuda":
            release_memory()
        arms: dict[str, _Arm] = {}
        for name in planned.runnable:
            arm = self._prepare(planned, name, rows)
            if arm is not None:
                arms[name] = arm
        if self.control:
            baselines = {arm.baseline or arm.name for arm in arms.values()}
            for name in [name for name in arms if name in baselines]:
                arms[name + AGAIN] = replace(arms[name], name=name + AGAIN, baseline=name)
        closures = {name: arm.workload.run for name, arm in arms.items()}
        # Events would see a launch cost only where the device waits for the host.
        timer = timer_for("cpu") if any(arm.workload.on_host for arm in arms.values()) else self.timer
        before = environment.snapshot(self.monitor)
        watch = compiling.CompileWatch()
        timings = list(measure(closures, timer, self.timing, self.seed, self.monitor).items())
        if sustained:
            # Listed first: making the copies takes memory and time that no timed call may spend.
            rotating = {n: tuple(a.workload.variants) or (a.workload.run,) for n, a in arms.items()}
            timings += measure_sustained(rotating, timer, self.timing, self.seed, self.monitor).items()
        # Dynamo counts by process, so a recompile can't be laid on one arm: every compiled arm of the case fails.
        recompiled = watch.steady_fault()
        state = {"before": before, "after": environment.snapshot(self.monitor)}
        return rows + [_time_row(planned, arms[name], timing, recompiled, state) for name, timing in timings]

    def _prepare(self, planned: PlannedCase, name: str, rows: list[Measurement]) -> _Arm | None:
        """Builds, compiles and checks one arm; None (and a failed row) where it may not be timed."""
        info = planned.suite.ARMS[name]
        resolved: dict[str, object] = {}
        try:
            workload = planned.suite.build(planned.case, name, self.device)
            resolved.update(workload.resolved)
            arm = _Arm(name, info.baseline, workload, resolved)
            if workload.compiled:
                rows.append(self._compile(planned, arm))
                if rows[-1].status == "failed":
                    return None
            numerics = workload.check()
            resolved.update(workload.resolved)  # a check may learn what really ran
        except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the sweep goes on
            rows.append(
                _row(planned, name, "failed", resolved=resolved | _trace(error), reason=one_line(error))
            )
            return None
        rows += _numerics_rows(planned, arm, numerics)
        if not numerics.ok:
            rows.append(
                _row(planned, name, "failed", workload.metric, resolved, f"numerics: {numerics.reason}")
            )
            return None
        return arm

    def _compile(self, planned: PlannedCase, arm: _Arm) -> Measurement:
        """The first call of a compiled arm, timed apart from all others."""
        compiling.prime(self.device)
        watch = compiling.CompileWatch()
        started = time.perf_counter()
        arm.workload.run()
        self.timer.synchronize()
        seconds = time.perf_counter() - started
        arm.resolved.update(watch.summary())
        fault = watch.fault()
        if fault:
            return _row(planned, arm.name, "failed", arm.workload.metric, arm.resolved, fault)
        return _row(planned, arm.name, "ok", "compile_s", arm.resolved, samples=(seconds,))

    def _device_lost(self, planned: PlannedCase) -> str:
        """After a CUDA fault every later call of the process fails; says so instead of failing case by case."""
        try:
            self.timer.synchronize()
        except RuntimeError as error:
            return f"{LOST} in case {planned.case.case_id}: {one_line(error)}; resume=RUN_ID runs the rest"
        return ""


def _time_row(
    planned: PlannedCase, arm: _Arm, timing: Timing, recompiled: str, state: Mapping[str, object]
) -> Measurement:
    work = arm.workload
    fault = timing.failure or (recompiled if work.compiled else "")
    if fault:
        return _row(planned, arm.name, "failed", work.metric, arm.resolved, fault, regime=timing.regime)
    return replace(
        _row(
            planned,
            arm.name,
            "ok",
            work.metric,
            arm.resolved,
            samples=tuple(timing.samples_ms),
            regime=timing.regime,
        ),
        rounds=tuple(timing.rounds),
        sample_clock_mhz=tuple(timing.sample_clock_mhz),
        flops=work.flops,
        bytes_moved=work.bytes_moved,
        timing={**timing.as_json_dict(), **state},
    )


def stored_cases(folder: Path, env_id: str, commit: str | None, plan: Plan) -> set[str]:
    """Ids of the cases of a plan that a run holds already with all of their arms, for resume=.

    Raises:
        UsageError: the run was made in another environment or by other code; its numbers would not be comparable.
    """
    rows = store.read(folder)
    others = set(rows["env_id"]) - {env_id}
    if others:
        raise UsageError(
            f"{folder.name} was measured in environment {sorted(others)[0]}, this one is {env_id}; "
            "start a new run (leave resume= out)"
        )
    commits = {json.loads(env).get("git_commit") for env in rows["env"].unique()}
    if commits - {commit}:
        raise UsageError(
            f"{folder.name} was measured by commit {', '.join(map(str, commits))}, this is {commit}; "
            "start a new run (leave resume= out)"
        )
    waiting = rows["reason"].str.startswith(BUDGET) | rows["reason"].str.startswith(LOST)
    stored = rows[~waiting].groupby("case_id")["arm"].agg(set)
    unfinished = set(rows[waiting]["case_id"])
    return {
        c.case.case_id
        for c in plan.cases
        if c.case.case_id not in unfinished and set(c.arms) <= stored.get(c.case.case_id, set())
    }


def _row(
    planned: PlannedCase,
    arm: str,
    status: Any,
    metric: str = "time_ms",
    resolved: Mapping[str, object] | None = None,
    reason: str = "",
    samples: tuple[float, ...] = (),
    regime: str = "",
) -> Measurement:
    name = arm.removesuffix(AGAIN)
    return Measurement(
        suite=planned.case.suite,
        case_id=planned.case.case_id,
        arm=arm,
        baseline=planned.suite.ARMS[name].baseline if arm == name else name,
        axes=planned.case.axes_json,
        seed=planned.case.seed,
        metric=metric,
        status=status,
        regime=regime,
        resolved=resolved or {},
        samples=samples,
        reason=reason,
    )


def _all_arms(planned: PlannedCase, status: str, reason: str) -> list[Measurement]:
    return [_row(planned, arm, status, reason=reason) for arm in planned.arms]


def _numerics_rows(planned: PlannedCase, arm: _Arm, numerics: Numerics) -> list[Measurement]:
    """The figures of the check; a figure that broke its bound is a failure with the figure in the reason."""
    if numerics.ok:
        return [
            _row(planned, arm.name, "ok", metric, arm.resolved, samples=(float(value),))
            for metric, value in numerics.values.items()
        ]
    return [
        _row(planned, arm.name, "failed", metric, arm.resolved, f"{value:.6g}; {numerics.reason}")
        for metric, value in numerics.values.items()
    ]


def _trace(error: BaseException) -> dict[str, object]:
    return {"traceback": "".join(traceback.format_exception(error))[-4000:]}
