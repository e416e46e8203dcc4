"""Tasks: what a sweep is made of, done here or by a worker: a case whose arms are timed, or one run of a trial suite.

A run depends on nothing but its case and arm, so on a CPU its result is the same bit for bit wherever and beside
whatever it runs; on a GPU as far as its kernels are deterministic (`harness.training.loop`).
"""

from __future__ import annotations

import functools
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.engine.bench import ArmFaultError, Bench, ChangedProcessError, Setting
from harness.engine.remote_arm import moved_for
from harness.engine.rows import rows_of_others, trial_rows, unfinished_rows, with_changes
from harness.engine.worker_process import Resubmit
from harness.machine import environment
from harness.store.cause import Cause
from harness.store.errors import cause_of, one_line
from harness.timing.rounds import timer_for
from harness.timing.workload import Trial, TrialSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.engine.plan import PlannedCase
    from harness.engine.stages import Stage
    from harness.engine.worker_process import Reporter
    from harness.store.case import Case
    from harness.store.measurement import Measurement

REPORT_S = 0.2  # between two messages about the steps of one run


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do.

    Attributes:
        planned: the case.
        arm: of a trial suite, the arm whose run this is; "" where the case is timed, all arms at once.
        workspace: where a run may keep checkpoints; None where the case is timed.
        sustained: time the case under sustained load as well.
        failed: rows of arms that were taken out of the case, see `drop_arm`.
        apart: arms that get a process of their own, each with the reason.
        setting: how it is measured, for a worker, which is given nothing else; None where the task is only counted.
    """

    planned: PlannedCase
    arm: str = ""
    workspace: Path | None = None
    sustained: bool = False
    failed: tuple[Measurement, ...] = ()
    apart: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    setting: Setting | None = None

    @property
    def case(self) -> Case:
        """The case, without what was planned for it."""
        return self.planned.case

    def __call__(self, tell: Reporter) -> tuple[list[Measurement] | Resubmit, bool]:
        """Do it as a job of a worker: the rows, and whether this process lost its device or ran out of memory."""
        assert self.setting is not None
        bench = _bench(self.setting)

        def keep(rows: list[Measurement]) -> None:
            try:
                tell.keep(rows)
            except Exception:  # noqa: BLE001 - whatever an object raises that does not let itself be pickled
                tell.keep(self.made_sendable(rows))

        try:
            rows = run_task(self, bench, _now_and_then(tell), tell.set_arm, keep, tell.stage)
        except ChangedProcessError as fault:
            return Resubmit(replace(self, apart={**self.apart, fault.arm: moved_for(fault.left)})), True
        except ArmFaultError as fault:
            rest = self._without(fault.arm, fault.rows, str(fault), Cause.BASELINE)
            if rest is not None:
                return Resubmit(rest), True
            others = rows_of_others(self.planned, fault.arm, str(fault), Cause.BASELINE)
            return [*fault.rows, *others], True
        return rows, bool(bench.lost()) or any(r.cause is Cause.OOM and r.status == "failed" for r in rows)

    def made_sendable(self, result: Any) -> Any:
        """The rows, or the task with its rows, without those that cannot be sent (`harness.engine.worker_process.Mendable`)."""
        from harness.engine.storable import made_sendable  # pyarrow, which starts threads

        if isinstance(result, Resubmit):
            task = result.job
            assert isinstance(task, Task)
            return Resubmit(replace(task, failed=tuple(made_sendable(task.failed))))
        return made_sendable(result)

    def drop_arm(self, arm: str, fault: str, printed: str, cause: Cause) -> Task | None:
        """The rest of it, without an arm that ended its process (`harness.engine.worker_process.Splittable`)."""
        rows = unfinished_rows(self.planned, arm, fault, printed, cause)
        return self._without(arm, rows, fault, cause, printed)

    def _without(
        self, arm: str, rows: Sequence[Measurement], reason: str, cause: Cause, printed: str = ""
    ) -> Task | None:
        """The task for the other arms of a case, which are then all timed in the same rounds.

        The arms that are compared with this one, directly or through another, fail with it.

        Args:
            arm: which has failed.
            rows: its own.
            reason: of the arms that fail with it, in words.
            cause: of the arms that fail with it.
            printed: the last lines that were printed.

        Returns:
            None where no arm would be left, and where the case is not timed or has no such arm.
        """
        planned, arms = self.planned, self.planned.suite.ARMS
        gone, more = {arm}, {arm}
        while more:
            more = {name for name in planned.runnable if arms[name].baseline in more} - gone
            gone |= more
        if self.arm or arm not in planned.runnable or gone >= set(planned.runnable):
            return None
        left = replace(planned, arms=tuple(name for name in planned.arms if name not in gone))
        compared = [
            one for name in planned.runnable if name in gone - {arm}
            for one in unfinished_rows(planned, name, reason, printed, cause)
        ]  # fmt: skip
        return replace(self, planned=left, failed=(*self.failed, *rows, *compared))


def run_task(
    task: Task,
    bench: Bench,
    tell: Callable[[int, int, str], None],
    on_arm: Callable[[str], None] = lambda arm: None,
    on_rows: Callable[[list[Measurement]], None] | None = None,
    on_stage: Callable[[Stage], None] = lambda stage: None,
) -> list[Measurement]:
    """The rows of a task, without those of `Task.failed`; an exception of its suite becomes rows too.

    Args:
        task: what to do.
        bench: measures in this process.
        tell: called with steps done, their total, and a text.
        on_arm: called with the current arm of a timed case; "" for none.
        on_rows: given the rows of a case that is timed between two rounds, as `Bench.measure` says.
        on_stage: called at the start of each stage of a case that is timed.

    Raises:
        ArmFaultError: an arm of a case that is timed took the device with it.
    """
    if task.workspace is None:
        return bench.measure(
            task.planned,
            sustained=task.sustained,
            apart=task.apart,
            on_sign=lambda what: tell(0, 0, what),
            on_stage=on_stage,
            on_arm=on_arm,
            on_rows=on_rows,
        )
    assert isinstance(task.planned.suite, TrialSuite)

    def on_step(done: int, total: int) -> None:
        tell(done, total, f"step {done} of {total}")

    device, trace = bench.setting.device, ""
    with bench.own_state(task.arm) as states:
        try:
            trial = task.planned.suite.trial(task.case, task.arm, device, task.workspace, on_step)
        except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the other runs go on
            trace = "".join(traceback.format_exception(error))[-4000:]
            trial = Trial((), failure=one_line(error), cause=cause_of(error, Cause.RUN))
    return with_changes(trial_rows(task.planned, task.arm, trial, trace), states.changed)


@functools.cache
def _bench(setting: Setting) -> Bench:
    """This process's own, with its timer and its monitor, which stay open for the next case."""
    monitor = environment.monitor_for(setting.device).__enter__()
    return Bench(setting, timer_for(setting.device), monitor)


def _now_and_then(tell: Callable[[int, int, str], None]) -> Callable[[int, int, str], None]:
    """Passes on every stage of a case, but of the steps of a run one in `REPORT_S`."""
    last = 0.0

    def told(done: int, total: int, what: str) -> None:
        nonlocal last
        if total == 0 or time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            tell(done, total, what)

    return told
