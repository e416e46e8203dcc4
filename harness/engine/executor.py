"""Executor: runs a plan, case by case, and turns everything that happens into rows.

Cases are timed one after the other, on several GPUs as many at once as there are GPUs. Where an arm is a run of its own
(`harness.timing.workload.TrialSuite`) the rows of each arm are stored when its run has ended, several runs may be under way at
once, and resume= goes on with the arms that are left.

With places to work at, each task is done by a worker process (`harness.engine.workers`): a case that crashes, hangs or asks for
too much memory takes its worker with it and ends as failed rows: of the arm that did it, the other arms are timed again.
Without any, all is done in this process.
"""

from __future__ import annotations

import functools
import math
import shutil
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.engine import tasks
from harness.engine.bench import ArmFaultError, Bench, Setting
from harness.engine.rows import is_trial, row, rows_of_others, skipped_rows, unfinished_rows
from harness.engine.storable import made_storable, refusal
from harness.engine.tasks import Task
from harness.engine.workers import Conditions, Ended, Pool
from harness.store.cause import RETRYABLE, Cause
from harness.store.run_files import CHECKPOINTS
from harness.timing.rounds import Timer, TimingConfig, timer_for
from harness.timing.workload import runs_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from harness import store
    from harness.engine.plan import Plan, PlannedCase
    from harness.engine.stages import Stage
    from harness.store.measurement import Measurement

TIMEOUT_S = 1800.0  # without a sign of life, beside the time that the timing itself may take


class _DiskError(Exception):
    """Rows could not be made durable; ends the run."""


@dataclass(slots=True)
class Outcome:
    """How a run ended: rows by status, and the state that is recorded with it."""

    state: str
    statuses: Counter[str] = field(default_factory=Counter)
    message: str = ""
    reasons: dict[str, None] = field(default_factory=dict)  # distinct reasons of the failed rows, in order


@dataclass(frozen=True, slots=True)
class Place:
    """Where workers compute.

    Attributes:
        conditions: of their processes; those of one GPU see that one alone.
        env_id: of the environment there; None: the run's own.
        env: the environment there.
    """

    conditions: Conditions
    env_id: str | None = None
    env: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Executor:
    """Runs the cases of a plan on one kind of device.

    Attributes:
        device: "cpu" or "cuda".
        timing: warm-up, rounds and stop rule.
        timer: how one block of calls is timed in this process; the device's own by default.
        seed: of the order of the arms within the rounds.
        control: time each baseline twice (A/A).
        warm_compile: see `harness.engine.bench.Setting`.
        monitor: reads clocks, power and throttling of the GPU in this process; None on a CPU.
        budget_s: start no case after this many seconds.
        folder: of the run, for files that belong to rows (traces).
        places: where cases are timed, one at a time each; none: everything is done in this process.
        lanes: runs of trial suites at once, over all places.
        case_timeout_s: a worker may be silent for so long; by default `TIMEOUT_S` and what the timing may take.
        case_wall_s: a worker may have a task for so long, even with heartbeats; None: without limit.
        on_case: called with each timed case before it starts.
        on_step: called for each run of a trial suite with the steps done and their total; 0 of 0 when it starts.
        on_stage: called at the start of each stage of a case that is timed.
        on_end: called when the rows of a case or run are stored.
        on_printed: given task and lines that a worker printed.
        clock: seconds; injectable for tests.
    """

    device: str
    timing: TimingConfig
    timer: Timer | None = None
    seed: int = 0
    control: bool = True
    warm_compile: bool = True
    monitor: Any = None
    budget_s: float | None = None
    folder: Path | None = None
    places: Sequence[Place] = ()
    lanes: int = 1
    case_timeout_s: float | None = None
    case_wall_s: float | None = None
    on_case: Callable[[PlannedCase], None] = lambda planned: None
    on_step: Callable[[Task, int, int], None] = lambda task, done, total: None
    on_stage: Callable[[Task, Stage], None] = lambda task, stage: None
    on_end: Callable[[Task], None] = lambda task: None
    on_printed: Callable[[Task | None, list[str]], None] = lambda task, lines: None
    clock: Callable[[], float] = time.perf_counter

    def run(
        self,
        plan: Plan,
        writer: store.RunWriter,
        done: Iterable[str] = (),
        done_arms: Iterable[tuple[str, str]] = (),
    ) -> Outcome:
        """Measures every case that is not in `done`; rows are durable before the next case of that place starts.

        Ctrl-C and a refusing disk end the run, never with rows lost: the outcome's state says which it was.

        Args:
            plan: what to measure.
            writer: where the rows go.
            done: ids of the cases that need nothing.
            done_arms: (case id, arm) of the runs of trial suites that need nothing.
        """
        finished = set(done)
        waiting = [c for c in plan.cases if c.case.case_id not in finished]
        run = _Run(self, writer)
        try:
            self._time_all(plan, [c for c in waiting if not is_trial(c)], run)
            self._run_all([c for c in waiting if is_trial(c)], run, set(done_arms))
        except _DiskError as error:
            run.outcome.state = "failed"
            kept = "the earlier rows are intact" if writer.folder.exists() else "the folder itself is gone"
            run.outcome.message = f"could not write to {writer.folder}: {error}; {kept}"
        except KeyboardInterrupt:
            run.outcome.state = "interrupted"
            run.outcome.message = "interrupted; the finished cases are stored"
        return run.outcome

    def _time_all(self, plan: Plan, cases: Sequence[PlannedCase], run: _Run) -> None:
        headline = plan.headline(self.timing.sustained_max_cases) if self.device == "cuda" else set()
        timed = [Task(c, sustained=c.case.case_id in headline, setting=run.setting) for c in cases]
        several = len(self.places) > 1
        run.do([t for t in timed if not (several and runs_alone(t.planned.suite))], self.places)
        run.do([t for t in timed if several and runs_alone(t.planned.suite)], self.places[:1])

    def _run_all(self, cases: Sequence[PlannedCase], run: _Run, done: set[tuple[str, str]]) -> None:
        """Makes the runs of trial suites that are not done, and stores each as it ends."""
        for planned in cases:
            skipped = skipped_rows(planned)
            run.store([r for r in skipped if (r.case_id, r.arm) not in done], planned)
        wanted = [
            Task(planned, arm, _workspace(run.writer, planned, arm), setting=run.setting)
            for planned in cases
            for arm in planned.runnable
            if (planned.case.case_id, arm) not in done
        ]
        workspaces = {task.workspace for task in wanted}
        _remove_others(run.writer.folder / CHECKPOINTS, workspaces)
        lanes = min(self.lanes, len(wanted))
        run.do(wanted, [self.places[i % len(self.places)] for i in range(lanes)] if self.places else ())
        _remove_others(run.writer.folder / CHECKPOINTS, workspaces)

    def timeout_s(self, tasks: Sequence[Task]) -> float:
        """How long a worker may be silent: while it gets one arm ready, times all, or makes one step of a run."""
        if self.case_timeout_s is not None:
            return self.case_timeout_s
        t = self.timing
        of_an_arm = t.max_seconds + t.sustained_seconds + t.sustained_rounds * t.sustained_lead_seconds
        most_arms = 1 + max((len(task.planned.arms) for task in tasks), default=0)
        return TIMEOUT_S + 2 * (t.warmup_max_seconds + of_an_arm * most_arms)


class _Run:
    """One run under way: what is done to each task, and what has come of all so far."""

    def __init__(self, executor: Executor, writer: store.RunWriter) -> None:
        self.executor, self.writer = executor, writer
        self.outcome = Outcome("finished")
        self.setting = Setting(
            executor.device,
            executor.timing,
            executor.seed,
            executor.control,
            executor.folder,
            executor.warm_compile,
        )
        self._started = executor.clock()
        self._lost = ""
        self._partial: dict[str, list[Measurement]] = {}  # case id -> the rows of its last snapshot

    def do(self, wanted: Sequence[Task], places: Sequence[Place]) -> None:
        """Does tasks, at some places or here, and stores the rows of each as it ends."""
        if not wanted:
            return
        # Closed here: an exception keeps this frame, and with it the generator and its worker processes.
        with closing(self._by_workers(wanted, places) if places else self._here(wanted)) as ended:
            self._store_each(ended, places)

    def _store_each(self, ended: Iterable[Ended], places: Sequence[Place]) -> None:
        for end in ended:
            task = end.job
            rows = end.result
            if end.fault:
                rows = unfinished_rows(task.planned, task.arm, end.fault, end.printed, end.cause)
                rows = self._with_partial(task, rows, end.fault, end.cause)
            place = places[end.worker] if places else None
            rows = [replace(r, tries=end.tries) for r in (*rows, *task.failed)]
            if task.arm and self.setting.device != "cpu" and place is not None and places.count(place) > 1:
                # Its seconds are those of a GPU that others computed on.
                rows = [
                    replace(r, resolved={**r.resolved, "runs_on_this_gpu": places.count(place)}) for r in rows
                ]
            self.store(rows, task.planned, place)
            waits = end.died or any(row.cause in RETRYABLE for row in rows)
            if task.workspace is not None and not waits:
                shutil.rmtree(task.workspace, ignore_errors=True)
            self.executor.on_end(task)

    def _by_workers(self, wanted: Sequence[Task], places: Sequence[Place]) -> Generator[Ended, None, None]:
        executor = self.executor

        def on_sign(task: Task, done: int, total: int) -> None:
            if task.arm and total:
                executor.on_step(task, done, total)

        def on_partial(task: Task, worker: int, rows: list[Measurement]) -> None:
            self.keep(task, rows, places[worker])

        conditions = [place.conditions for place in places]
        silence_s, wall_s = executor.timeout_s(wanted), executor.case_wall_s or math.inf
        with Pool(conditions, silence_s, wall_s, executor.on_printed) as pool:
            yield from pool.run(self._that_may_start(wanted), on_sign, on_partial, executor.on_stage)

    def _here(self, wanted: Sequence[Task]) -> Generator[Ended, None, None]:
        executor = self.executor
        bench = Bench(self.setting, executor.timer or timer_for(executor.device), executor.monitor)
        for task in self._that_may_start(wanted):

            def tell(done: int, total: int, what: str, task: Task = task) -> None:
                if task.arm:
                    executor.on_step(task, done, total)

            try:
                rows = tasks.run_task(
                    task,
                    bench,
                    tell,
                    on_rows=functools.partial(self.keep, task),
                    on_stage=functools.partial(executor.on_stage, task),
                )
            except ArmFaultError as error:  # there is no other process that could time the other arms
                words = error.rows[-1].reason
                why = f"the device was lost in arm {error.arm}: {words}; resume=RUN_ID runs the case again"
                others = rows_of_others(task.planned, error.arm, why, Cause.DEVICE_LOST)
                rows = [*error.rows, *others]
            yield Ended(task, result=rows)
            fault = bench.lost()
            if fault:
                self._lost = (
                    f"the device was lost in case {task.case.case_id}: {fault}; resume=RUN_ID runs the rest"
                )

    def _that_may_start(self, wanted: Sequence[Task]) -> Iterator[Task]:
        """The tasks in order; one that may not start, when its turn comes, is stored as rows that say why."""
        for task in wanted:
            if not task.arm:
                self.executor.on_case(task.planned)
            if not self._lost and self._in_budget():
                if task.arm:
                    self.executor.on_step(task, 0, 0)
                yield task
                continue
            if self._lost:
                status, why, cause = "failed", self._lost, Cause.DEVICE_LOST
            else:
                status, why, cause = "skipped", self._over_budget(task), Cause.BUDGET
            arms = [task.arm] if task.arm else task.planned.arms
            self.store(
                [row(task.planned, arm, status, reason=why, cause=cause) for arm in arms], task.planned
            )
            self.executor.on_end(task)

    def _over_budget(self, task: Task) -> str:
        what = "run" if task.arm else "case"
        return (
            f"time budget of {self.executor.budget_s:g} s was spent before this {what}; resume=RUN_ID runs it"
        )

    def _in_budget(self) -> bool:
        budget = self.executor.budget_s
        return budget is None or self.executor.clock() - self._started <= budget

    def keep(self, task: Task, rows: list[Measurement], place: Place | None = None) -> None:
        """Makes a snapshot of a case under way durable; one of fewer rounds, as of another try, replaces nothing."""
        case_id = task.case.case_id
        if _rounds(rows) < _rounds(self._partial.get(case_id, ())):
            return
        try:
            self.writer.checkpoint([*rows, *task.failed], _env_of(place))
        except OSError as error:
            raise _DiskError(error.strerror) from error
        except Exception:  # noqa: BLE001 - whatever an object in a row raises; the final rows will say so
            return
        self._partial[case_id] = rows

    def _with_partial(
        self, task: Task, rows: list[Measurement], fault: str, cause: Cause
    ) -> list[Measurement]:
        """The rows of a case that came to no end: of an arm with finished rounds those, with what ended it."""
        kept = [r for r in self._partial.get(task.case.case_id, ()) if r.status == "partial"]
        arms = {r.arm for r in kept}
        return [replace(r, reason=f"{r.reason}; {fault}", cause=cause) for r in kept] + [
            r for r in rows if r.arm not in arms
        ]

    def store(self, rows: Sequence[Measurement], planned: PlannedCase, place: Place | None = None) -> None:
        """Makes rows durable and counts them; one that no file can hold becomes a failed row that says so."""
        env_of = _env_of(place)
        self._partial.pop(planned.case.case_id, None)
        try:
            try:
                self.writer.append(rows, env_of)
            except OSError:
                raise
            except Exception:
                # Found out only now: a second look at each row would cost every case more than writing it does.
                if not any(refusal(r) for r in rows):
                    raise  # it is none of theirs
                rows = [made_storable(r) for r in rows]
                self.writer.append(rows, env_of)
        except OSError as error:
            raise _DiskError(error.strerror) from error
        self.outcome.statuses.update(r.status for r in rows)
        failed = (f"{planned.case}, {r.arm}: {r.reason}" for r in rows if r.status == "failed")
        self.outcome.reasons.update(dict.fromkeys(failed))


def _env_of(place: Place | None) -> tuple[str, Mapping[str, object]] | None:
    return (place.env_id, place.env) if place is not None and place.env_id is not None else None


def _rounds(rows: Iterable[Measurement]) -> int:
    """Finished rounds that a snapshot holds."""
    return max((1 + max(r.rounds) for r in rows if r.rounds), default=0)


def _workspace(writer: store.RunWriter, planned: PlannedCase, arm: str) -> Path:
    return writer.folder.absolute() / CHECKPOINTS / f"{planned.case.case_id}-{arm}"


def _remove_others(folder: Path, wanted: set[Path | None]) -> None:
    """Removes what is left of runs that are stored: a killed sweep may have had no time to; itself, once it is empty."""
    left = {path.absolute() for path in folder.iterdir()} if folder.exists() else set()
    for workspace in left - wanted:
        shutil.rmtree(workspace, ignore_errors=True)
    if not left & wanted:
        with suppress(OSError):  # there is none; or its disk refuses, which costs no row
            folder.rmdir()
