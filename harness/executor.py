"""Executor: runs a plan, case by case, and turns everything that happens into rows.

Within a case the order is fixed: build every arm, compile (timed apart), check the numerics, and only then
time the arms that are right, interleaved. An arm that cannot be built, is wrong, or recompiles while it is
timed ends as a `failed` row with its reason; the other arms go on.

Where an arm is a run of its own (`harness.workload.TrialSuite`) nothing is interleaved: the rows of each arm are
stored when its run has ended, and resume= goes on with the arms that are left.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness import compiling, environment, store, trials
from harness.errors import one_line
from harness.resume import BUDGET, LOST
from harness.rows import (
    AGAIN,
    PreparedArm,
    about,
    all_arms,
    energy_row,
    is_trial,
    numerics_rows,
    row,
    time_row,
    trial_rows,
)
from harness.timers import release_memory
from harness.timing import Timer, TimingConfig, measure, measure_sustained, timer_for
from harness.workload import Suite, TrialSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from harness.measurement import Measurement
    from harness.plan import Plan, PlannedCase
    from harness.workload import Workload

CHECKPOINTS = "checkpoints"  # folder in a run's own, for those of the runs under way


class _DiskError(Exception):
    """Rows could not be made durable; ends the run."""


@dataclass(slots=True)
class Outcome:
    """How a run ended: rows by status, and the state that is recorded with it."""

    state: str
    statuses: Counter[str] = field(default_factory=Counter)
    message: str = ""
    reasons: list[str] = field(default_factory=list)  # distinct reasons of the failed rows, in order


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
        folder: of the run, for files that belong to rows (traces).
        lanes: runs of trial suites at once, each in a process of its own if there are several.
        on_case: told of each case that is timed before it starts.
        on_step: told of each run of a trial suite how many steps are done, and of how many; 0 of 0 when it starts.
        clock: seconds; injectable for tests.
    """

    device: str
    timer: Timer
    timing: TimingConfig
    seed: int = 0
    control: bool = True
    monitor: Any = None
    budget_s: float | None = None
    folder: Path | None = None
    lanes: int = 1
    on_case: Callable[[PlannedCase], None] = lambda planned: None
    on_step: Callable[[trials.Task, int, int], None] = lambda task, done, total: None
    clock: Callable[[], float] = time.perf_counter

    def run(
        self,
        plan: Plan,
        writer: store.RunWriter,
        done: Iterable[str] = (),
        done_arms: Iterable[tuple[str, str]] = (),
    ) -> Outcome:
        """Measures every case that is not in `done`; a case's rows are durable before the next one starts.

        Ctrl-C and a refusing disk end the run, never with rows lost: the outcome's state says which it was.

        Args:
            plan: what to measure.
            writer: where the rows go.
            done: ids of the cases that need nothing.
            done_arms: (case id, arm) of the runs of trial suites that need nothing.
        """
        outcome, started = Outcome("finished"), self.clock()
        finished = set(done)
        waiting = [c for c in plan.cases if c.case.case_id not in finished]

        def in_budget() -> bool:
            return self.budget_s is None or self.clock() - started <= self.budget_s

        try:
            self._time_all(plan, [c for c in waiting if not is_trial(c)], writer, outcome, in_budget)
            self._run_all([c for c in waiting if is_trial(c)], writer, outcome, in_budget, set(done_arms))
        except _DiskError as error:
            outcome.state = "failed"
            outcome.message = f"could not write to {writer.folder}: {error}; the earlier rows are intact"
        except KeyboardInterrupt:
            outcome.state = "interrupted"
            outcome.message = "interrupted; the finished cases are stored"
        return outcome

    def _time_all(
        self,
        plan: Plan,
        cases: Sequence[PlannedCase],
        writer: store.RunWriter,
        outcome: Outcome,
        in_budget: Callable[[], bool],
    ) -> None:
        headline = plan.headline(self.timing.sustained_max_cases) if self.device == "cuda" else set()
        lost = ""
        for planned in cases:
            self.on_case(planned)
            if lost:
                rows = all_arms(planned, "failed", lost)
            elif not in_budget():
                rows = all_arms(planned, "skipped", self._over_budget("case"))
            else:
                rows = self._rows_of(planned, sustained=planned.case.case_id in headline)
                lost = self._device_lost(planned)
            _store(rows, planned, writer, outcome)

    def _run_all(
        self,
        cases: Sequence[PlannedCase],
        writer: store.RunWriter,
        outcome: Outcome,
        in_budget: Callable[[], bool],
        done: set[tuple[str, str]],
    ) -> None:
        """Makes the runs of trial suites that are not done, and stores each as it ends."""
        try:
            writer.carry_over(done)
        except OSError as error:
            raise _DiskError(error.strerror) from error
        planned_of = {planned.case: planned for planned in cases}
        for planned in cases:
            skipped = [
                row(planned, arm, "skipped", reason=why.reason)
                for arm, why in planned.unsupported.items()
                if (planned.case.case_id, arm) not in done
            ]
            _store(skipped, planned, writer, outcome)
        tasks = [
            trials.Task(_trial_suite(planned), planned.case, arm, _workspace(writer, planned, arm))
            for planned in cases
            for arm in planned.runnable
            if (planned.case.case_id, arm) not in done
        ]
        left = {(task.case, task.arm): task for task in tasks}
        _remove_others(writer.folder / CHECKPOINTS, {task.workspace for task in tasks})
        lost = ""

        def may_start() -> bool:
            return not lost and in_budget()

        for ended in trials.run(tasks, self.device, self.lanes, self.on_step, may_start):
            task = ended.task
            del left[task.case, task.arm]
            planned = planned_of[task.case]
            _store(trial_rows(planned, ended), planned, writer, outcome)
            if not ended.died:
                shutil.rmtree(task.workspace, ignore_errors=True)
            lost = lost or self._device_lost(planned)
        for case, arm in left:
            planned = planned_of[case]
            status, why = ("failed", lost) if lost else ("skipped", self._over_budget("run"))
            _store([row(planned, arm, status, reason=why)], planned, writer, outcome)
        _remove_others(writer.folder / CHECKPOINTS, {task.workspace for task in tasks})

    def _over_budget(self, what: str) -> str:
        return f"{BUDGET} of {self.budget_s:g} s was spent before this {what}; resume=RUN_ID runs it"

    def _rows_of(self, planned: PlannedCase, *, sustained: bool) -> list[Measurement]:
        """The rows of a case; a fault outside of any one arm (a suite's bug, a dead device) fails all its arms."""
        try:
            return self.measure_case(planned, sustained=sustained)
        except Exception as error:  # noqa: BLE001 - the other cases of the sweep go on
            return all_arms(planned, "failed", one_line(error))

    def measure_case(self, planned: PlannedCase, *, sustained: bool = False) -> list[Measurement]:
        """All rows of one case."""
        rows = [row(planned, arm, "skipped", reason=why.reason) for arm, why in planned.unsupported.items()]
        compiling.reset()
        if self.device == "cuda":
            release_memory()
        arms: dict[str, PreparedArm] = {}
        for name in planned.runnable:
            arm = self._prepare(planned, name, rows)
            if arm is not None:
                arms[name] = arm
            elif self.device == "cuda":
                release_memory()  # what this arm held is there for the next one, now that no frame holds it
        if self.control:
            baselines = {arm.baseline or arm.name for arm in arms.values()}
            for name in [name for name in arms if name in baselines]:
                arms[name + AGAIN] = replace(arms[name], name=name + AGAIN, baseline=name)
        closures = {name: arm.workload.run for name, arm in arms.items()}
        resident = {n: a.workload.resident for n, a in arms.items() if a.workload.resident is not None}
        # Events would see a launch cost only where the device waits for the host.
        timer = timer_for("cpu") if any(arm.workload.on_host for arm in arms.values()) else self.timer
        before = environment.snapshot(self.monitor)
        watch = compiling.CompileWatch()
        timings = list(
            measure(closures, timer, self.timing, self.seed, self.monitor, resident=resident).items()
        )
        if sustained and not resident:  # a resident arm is timed under its own load already
            # Listed first: making the copies takes memory and time that no timed call may spend.
            rotating = {n: tuple(a.workload.variants) or (a.workload.run,) for n, a in arms.items()}
            timings += measure_sustained(rotating, timer, self.timing, self.seed, self.monitor).items()
        # Dynamo counts by process, so a recompile can't be laid on one arm: every compiled arm of the case fails.
        recompiled = watch.steady_fault()
        state = {"before": before, "after": environment.snapshot(self.monitor)}
        rows += [time_row(planned, arms[name], timing, recompiled, state) for name, timing in timings]
        energy = [
            energy_row(planned, arms[name], timing, self.device)
            for name, timing in timings
            if arms[name].workload.tokens and not timing.failure
        ]
        return rows + [row for row in energy if row.status == "ok" or not row.arm.endswith(AGAIN)]

    def _prepare(self, planned: PlannedCase, name: str, rows: list[Measurement]) -> PreparedArm | None:
        """Builds, compiles and checks one arm; None (and a failed row) where it may not be timed."""
        info = planned.suite.ARMS[name]
        resolved: dict[str, object] = {}
        try:
            workload = _timed_suite(planned).build(planned.case, name, self.device)
            resolved.update(workload.resolved)
            arm = PreparedArm(name, info.baseline, workload, resolved)
            if workload.compiled:
                rows += self._compile(planned, arm)
                if rows[-1].status == "failed":
                    return None
            numerics = workload.check()
            resolved.update(workload.resolved)  # a check may learn what really ran
            if numerics.ok and workload.profile is not None and self.folder is not None:
                profiled = workload.profile(self.folder)
                resolved.update(workload.resolved)
                rows += numerics_rows(planned, arm, profiled)
        except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the sweep goes on
            rows.append(
                row(planned, name, "failed", resolved=resolved | about(error), reason=one_line(error))
            )
            return None
        rows += numerics_rows(planned, arm, numerics)
        if not numerics.ok:
            rows.append(
                row(planned, name, "failed", workload.metric, resolved, f"numerics: {numerics.reason}")
            )
            return None
        return arm

    def _compile(self, planned: PlannedCase, arm: PreparedArm) -> list[Measurement]:
        """The first call of a compiled arm, timed apart from all others; again with warm caches where it can be."""
        compiling.prime(self.device)
        work = arm.workload
        with compiling.empty_caches() if work.recompile is not None else nullcontext():
            watch = compiling.CompileWatch()
            seconds = self._first_call(work)
            arm.resolved.update(watch.summary())
            fault = watch.fault()
            if fault:
                return [row(planned, arm.name, "failed", work.metric, arm.resolved, fault)]
            rows = [row(planned, arm.name, "ok", "compile_s", arm.resolved, samples=(seconds,))]
            if work.recompile is not None:
                work.recompile()
                again = row(
                    planned, arm.name, "ok", "compile_s", arm.resolved, samples=(self._first_call(work),)
                )
                rows.append(replace(again, part="warm"))
        return rows

    def _first_call(self, work: Workload) -> float:
        """Seconds of a call that compiles."""
        with work.held():
            started = time.perf_counter()
            work.run()
            self.timer.synchronize()
            return time.perf_counter() - started

    def _device_lost(self, planned: PlannedCase) -> str:
        """After a CUDA fault every later call of the process fails; says so instead of failing case by case.

        A device that is well gets back what the case left in its memory.
        """
        try:
            self.timer.synchronize()
            if self.device == "cuda":
                release_memory()
        except RuntimeError as error:
            return f"{LOST} in case {planned.case.case_id}: {one_line(error)}; resume=RUN_ID runs the rest"
        return ""


def _trial_suite(planned: PlannedCase) -> TrialSuite:
    assert isinstance(planned.suite, TrialSuite)
    return planned.suite


def _timed_suite(planned: PlannedCase) -> Suite:
    assert isinstance(planned.suite, Suite)
    return planned.suite


def _workspace(writer: store.RunWriter, planned: PlannedCase, arm: str) -> Path:
    return writer.folder / CHECKPOINTS / f"{planned.case.case_id}-{arm}"


def _remove_others(folder: Path, wanted: set[Path]) -> None:
    """Removes what is left of runs that are stored: a killed sweep may have had no time to; itself, once it is empty."""
    left = set(folder.iterdir()) if folder.exists() else set()
    for workspace in left - wanted:
        shutil.rmtree(workspace, ignore_errors=True)
    if not left & wanted:
        with suppress(OSError):  # there is none; or its disk refuses, which costs no row
            folder.rmdir()


def _store(rows: list[Measurement], planned: PlannedCase, writer: store.RunWriter, outcome: Outcome) -> None:
    """Makes rows durable and counts them."""
    try:
        writer.append(rows)
    except OSError as error:
        raise _DiskError(error.strerror) from error
    outcome.statuses.update(r.status for r in rows)
    failed = (f"{planned.case}, {r.arm}: {r.reason}" for r in rows if r.status == "failed")
    outcome.reasons += [reason for reason in failed if reason not in outcome.reasons]
