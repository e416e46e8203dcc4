"""Executor: runs a plan, case by case, and turns everything that happens into rows.

Cases are timed one after the other, on several GPUs as many at once as there are GPUs. Where an arm is a run of its own
(`harness.timing.workload.TrialSuite`) the rows of each arm are stored when its run has ended, several runs may be under way at
once, and resume= goes on with the arms that are left.

Each arm has a process of its own (`harness.engine.arms`), wherever there are places to work at. The death of one may come from
outside (the kernel's memory killer, an operator), so the case, or the run, is then done once more.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.engine import arm_process
from harness.engine.arms import UNFIT, ArmPool, TimeLimits, failed_row
from harness.engine.bench import Setting, measure_case
from harness.engine.plan import Task
from harness.engine.rows import all_arms, row, skipped_rows, trial_rows
from harness.engine.stages import Mark, Stage, Steps
from harness.machine.gpu_monitor import GpuMonitor, monitor_for
from harness.store.errors import RETRYABLE, Cause, LateError, cause_of, one_line
from harness.store.run_files import CHECKPOINTS
from harness.timing.workload import runs_alone, world_of

if TYPE_CHECKING:
    from pathlib import Path

    from harness import store
    from harness.engine.arm_process import Conditions
    from harness.engine.plan import PlannedCase, SweepPlan
    from harness.engine.turns import Turns
    from harness.store.measurement import Measurement

What = Mark | Stage | Steps | list[str]  # the last: lines that a process printed
OnTask = Callable[[Task | None, What], None]


class _DiskError(Exception):
    """Rows could not be made durable; ends the run."""


class _StoppedError(Exception):
    """Another lane has ended the run."""


@dataclass(slots=True)
class RunOutcome:
    """How a run ended: rows by status, and the state that is recorded with it."""

    state: str
    statuses: Counter[str] = field(default_factory=Counter)
    message: str = ""
    # (status, reason) of the rows that are failed or skipped, in order -> what they are rows of
    reasons: dict[tuple[str, str], list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes compute.

    Attributes:
        conditions: of the processes; those of one GPU see that one alone.
        env_id: of the environment there; None: the run's own.
        env: the environment there.
        gpu: UUID of the one GPU; "": the current one.
    """

    conditions: Conditions
    env_id: str | None = None
    env: Mapping[str, object] = field(default_factory=dict)
    gpu: str = ""


def run(
    plan: SweepPlan,
    writer: store.RunWriter,
    setting: Setting,
    *,
    places: Sequence[Place] = (),
    lanes: int = 1,
    limits: TimeLimits | None = None,
    notify: OnTask = lambda task, what: None,
    done: Iterable[str] = (),
    done_arms: Iterable[tuple[str, str]] = (),
    monitor: Any = None,
    clock: Callable[[], float] = time.perf_counter,
    turns: Turns | None = None,
) -> RunOutcome:
    """Measures every case that is not in `done`; rows are durable before the next case of that place starts.

    Ctrl-C and a refusing disk end the run, never with rows lost: the outcome's state says which it was.

    Args:
        plan: what to measure.
        writer: where the rows go.
        setting: how cases are measured.
        places: where cases are timed, one at a time each; none: everything is done in this process.
        lanes: runs of trial suites at once, over all places.
        limits: how long things may take.
        notify: given what happens, as it happens: a task and what becomes of it.
        done: ids of the cases that need nothing.
        done_arms: (case id, arm) of the runs of trial suites that need nothing.
        monitor: reads clocks, power and throttling of the GPU; by default that of the place.
        clock: seconds; injectable for tests.
        turns: which cases are measured, and when, is asked of it.
    """
    finished, made = set(done), set(done_arms)
    waiting = [*plan.tasks(finished, made)]
    under_way = _Run(writer, setting, limits or TimeLimits(), notify, monitor, clock, turns)
    headline = plan.headline(setting.timing.sustained_max_cases) if setting.device == "cuda" else set()
    try:
        for alone in (False, True) if len(places) > 1 else (None,):
            own = [t for t in waiting if not t.arm and alone in (None, runs_alone(t.planned.suite))]
            tasks = [replace(task, sustained=task.case.case_id in headline) for task in own]
            under_way.do(tasks, places[:1] if alone else places)
        for planned in plan.cases:
            if planned.is_trial and planned.case.case_id not in finished:
                rows = [r for r in skipped_rows(planned) if (r.case_id, r.arm) not in made]
                under_way.store(rows, planned)
        runs = [replace(task, workspace=_workspace(writer, task)) for task in waiting if task.arm]
        workspaces = {task.workspace for task in runs}
        _remove_others(writer.folder / CHECKPOINTS, workspaces)
        at_once = min(lanes, len(runs)) if places else 0
        under_way.do(runs, [places[i % len(places)] for i in range(at_once)])
        _remove_others(writer.folder / CHECKPOINTS, workspaces)
    except _DiskError as error:
        under_way.outcome.state = "failed"
        kept = "the earlier rows are intact" if writer.folder.exists() else "the folder itself is gone"
        under_way.outcome.message = f"could not write to {writer.folder}: {error}; {kept}"
    except KeyboardInterrupt:
        under_way.outcome.state = "interrupted"
        under_way.outcome.message = "interrupted; the finished cases are stored"
    return under_way.outcome


class _Run:
    """One run under way: what is done to each task, and what has come of all so far."""

    def __init__(
        self,
        writer: store.RunWriter,
        setting: Setting,
        limits: TimeLimits,
        notify: OnTask,
        monitor: Any,
        clock: Callable[[], float],
        turns: Turns | None,
    ) -> None:
        self.turns = turns
        self.writer, self.setting, self.limits = writer, setting, limits
        self.outcome = RunOutcome("finished")
        self._notify, self._monitor, self._clock = notify, monitor, clock
        self._started = clock()
        self._lost = ""
        self._partial: dict[str, list[Measurement]] = {}  # case id -> the rows of its last snapshot
        self._lock = threading.RLock()  # lanes are threads that wait for processes
        self._arm_pools: list[ArmPool] = []
        self._stopped = False

    def notify(self, task: Task | None, what: What) -> None:
        """Passes on what happens, one at a time."""
        with self._lock:
            if not self._stopped:
                self._notify(task, what)

    def do(self, wanted: Sequence[Task], places: Sequence[Place]) -> None:
        """Does tasks, one at a time at each place or here, and stores the rows of each as it ends."""
        if not wanted:
            return
        turns = self._that_may_start(wanted)
        if len(places) < 2:
            self._lane(turns, places[0] if places else None, 1)
            return
        with ThreadPoolExecutor(len(places)) as pool:
            lanes = [pool.submit(self._lane, turns, place, places.count(place)) for place in places]
            try:
                for lane in as_completed(lanes):
                    lane.result()
            except BaseException:
                with self._lock:
                    self._stopped = True
                for arm_pool in self._arm_pools:
                    arm_pool.kill()
                raise

    def _lane(self, turns: Iterator[Task], place: Place | None, beside: int) -> None:
        """One task after another."""
        task: Task | None = None
        device, conditions = self.setting.device, place.conditions if place is not None else None
        with (
            self._monitor_at(place) as monitor,
            ArmPool(conditions, self.limits, device, lambda what: self.notify(task, what)) as arm_pool,
        ):
            self._arm_pools.append(arm_pool)
            while True:
                with self._lock:
                    task = None if self._stopped else next(turns, None)
                if task is None:
                    return
                self._one(task, arm_pool, monitor, place, beside)

    def _monitor_at(self, place: Place | None) -> AbstractContextManager[Any]:
        if self._monitor is not None:
            return nullcontext(self._monitor)
        return (
            GpuMonitor(uuid=place.gpu)
            if place is not None and place.gpu
            else monitor_for(self.setting.device)
        )

    def _one(self, task: Task, arm_pool: ArmPool, monitor: Any, place: Place | None, beside: int) -> None:
        tries, rows = 1, self._rows(task, arm_pool, monitor, place)
        if place is not None and not self._stopped and any(r.cause is Cause.DIED for r in rows):
            tries, rows = 2, self._rows(task, arm_pool, monitor, place)
        rows = [replace(r, tries=tries) for r in rows]
        if task.arm and self.setting.device != "cpu" and beside > 1:
            # Its seconds are those of a GPU that others computed on.
            rows = [replace(r, resolved={**r.resolved, "runs_on_this_gpu": beside}) for r in rows]
        self.store(rows, task.planned, place)
        if task.workspace is not None and not any(r.cause in RETRYABLE for r in rows):
            shutil.rmtree(task.workspace, ignore_errors=True)
        if place is None and (fault := arm_pool.lost()):
            self._lost = (
                f"the device was lost in case {task.case.case_id}: {fault}; resume=RUN_ID runs the rest"
            )
        self.notify(task, Mark.ENDED)

    def _rows(self, task: Task, arm_pool: ArmPool, monitor: Any, place: Place | None) -> list[Measurement]:
        """What comes of a task, whatever that is."""

        def notify(what: What) -> None:
            self.notify(task, what)

        try:
            if task.arm:
                return _trial(task, arm_pool, self.setting.device, notify)
            return measure_case(
                task.planned,
                arm_pool,
                self.setting,
                monitor,
                sustained=task.sustained,
                notify=notify,
                on_rows=lambda rows: self.keep(task, rows, place),
                turns=self.turns,
            )
        except (_DiskError, _StoppedError):
            raise
        except LateError as error:
            fault, cause = str(error), Cause.TIMEOUT
        except Exception as error:  # noqa: BLE001 - a fault of none of its arms; the other cases of the sweep go on
            fault, cause = one_line(error), cause_of(error, Cause.ERROR)
        arm_pool.keep(())  # they are amid of it
        return self._unfinished(task, fault, cause)

    def _unfinished(self, task: Task, fault: str, cause: Cause) -> list[Measurement]:
        """The rows of a case that came to no end: of an arm with finished rounds those, with what ended it."""
        kept = [r for r in self._partial.get(task.case.case_id, ()) if r.status == "partial"]
        failed = [task.arm] if task.arm else task.planned.runnable
        arms = {r.arm for r in kept}
        return [
            *(replace(r, reason=f"{r.reason}; {fault}", cause=cause) for r in kept),
            *([] if task.arm else skipped_rows(task.planned)),
            *(row(task.planned, a, "failed", reason=fault, cause=cause) for a in failed if a not in arms),
        ]

    def _that_may_start(self, wanted: Sequence[Task]) -> Iterator[Task]:
        """The tasks in order; one that may not start, when its turn comes, is stored as rows that say why."""
        for task in wanted if self.turns is None else self.turns.of(wanted):
            self.notify(task, Mark.BEGUN)
            if self._lost:
                self._leave_out(task, "failed", self._lost, Cause.DEVICE_LOST)
            elif self._clock() - self._started > self.limits.budget_s:
                what = "run" if task.arm else "case"
                why = f"time budget of {self.limits.budget_s:g} s was spent before this {what}; resume=RUN_ID runs it"
                self._leave_out(task, "skipped", why, Cause.BUDGET)
            else:
                yield task

    def _leave_out(self, task: Task, status: str, why: str, cause: Cause) -> None:
        alone = replace(task.planned, arms=(task.arm,)) if task.arm else task.planned
        self.store(all_arms(alone, status, why, cause), task.planned)
        self.notify(task, Mark.ENDED)

    def keep(self, task: Task, rows: list[Measurement], place: Place | None = None) -> None:
        """Makes a snapshot of a case under way durable; one of fewer rounds, as of another try, replaces nothing."""
        case_id = task.case.case_id
        with self._lock:
            if self._stopped:
                raise _StoppedError
            if _rounds(rows) < _rounds(self._partial.get(case_id, ())):
                return
            try:
                self.writer.checkpoint(rows, _env_of(place))
            except OSError as error:
                raise _DiskError(error.strerror) from error
            self._partial[case_id] = rows

    def store(self, rows: Sequence[Measurement], planned: PlannedCase, place: Place | None = None) -> None:
        """Makes rows durable and counts them."""
        with self._lock:
            if self._stopped:
                raise _StoppedError
            self._partial.pop(planned.case.case_id, None)
            try:
                rows = self.writer.append(rows, _env_of(place))
            except OSError as error:
                raise _DiskError(error.strerror) from error
            self.outcome.statuses.update(r.status for r in rows)
            for r in rows:
                if r.status in {"failed", "skipped"}:
                    what = f"{planned.case}, {r.arm}" if r.status == "failed" else r.arm
                    self.outcome.reasons.setdefault((r.status, r.reason), []).append(what)


def _trial(task: Task, arm_pool: ArmPool, device: str, notify: Callable[[What], None]) -> list[Measurement]:
    """The rows of a run."""
    assert task.workspace is not None
    arm_pool.begin([task.arm], world_of(task.planned.suite, task.case))
    try:
        args = (task.planned, task.arm, device, task.workspace)
        made = arm_pool.of(task.arm).call(arm_process.trial, *args, what="its start", notify=notify)
        rows = trial_rows(task.planned, task.arm, made)
    except UNFIT as error:
        rows = [failed_row(task.planned, task.arm, error)]
    return arm_pool.end(rows)


def _env_of(place: Place | None) -> tuple[str, Mapping[str, object]] | None:
    return (place.env_id, place.env) if place is not None and place.env_id is not None else None


def _rounds(rows: Iterable[Measurement]) -> int:
    """Finished rounds that a snapshot holds."""
    return max((1 + max(r.rounds) for r in rows if r.rounds), default=0)


def _workspace(writer: store.RunWriter, task: Task) -> Path:
    return writer.folder.absolute() / CHECKPOINTS / f"{task.case.case_id}-{task.arm}"


def _remove_others(folder: Path, wanted: set[Path | None]) -> None:
    """Removes what is left of runs that are stored: a killed sweep may have had no time to; itself, once it is empty."""
    left = {path.absolute() for path in folder.iterdir()} if folder.exists() else set()
    for workspace in left - wanted:
        shutil.rmtree(workspace, ignore_errors=True)
    if not left & wanted:
        with suppress(OSError):  # there is none; or its disk refuses, which costs no row
            folder.rmdir()
