"""Preparing: one arm is built, compiled and checked, wherever that is; only an arm that is right may be timed."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.engine.rows import PreparedArm, about, numerics_rows, row
from harness.engine.stages import Stage, StageKind
from harness.store.cause import Cause
from harness.store.errors import SpoiledError, cause_of, one_line
from harness.timing import compiling
from harness.timing.workload import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engine.bench import Setting
    from harness.engine.plan import PlannedCase
    from harness.store.measurement import Measurement
    from harness.timing.timers import Timer
    from harness.timing.workload import Workload


def prepare(
    planned: PlannedCase,
    name: str,
    setting: Setting,
    timer: Timer,
    rows: list[Measurement],
    on_stage: Callable[[Stage], None] = lambda stage: None,
) -> PreparedArm | None:
    """Build, compile and check one arm in this process.

    Args:
        planned: the case.
        name: of the arm.
        setting: how cases are measured.
        timer: waits for the device after a first call.
        rows: gets the arm's rows up to here.
        on_stage: called at the start of each stage.

    Returns:
        None where the arm may not be timed; its last row says why.

    Raises:
        SpoiledError: the arm may not be timed, and nothing else may in this process.
    """
    suite, info = planned.suite, planned.suite.ARMS[name]
    assert isinstance(suite, Suite)
    resolved: dict[str, object] = {}
    on_stage(Stage(StageKind.BUILD, name))
    try:
        workload = suite.build(planned.case, name, setting.device)
        resolved.update(workload.resolved)
        arm = PreparedArm(name, info.baseline, workload, resolved)
        if workload.compiled:
            on_stage(Stage(StageKind.COMPILE, name))
            rows += _compile(planned, arm, setting, timer)
            if rows[-1].status == "failed":
                return None
        on_stage(Stage(StageKind.CHECK, name))
        numerics = workload.check()
        resolved.update(workload.resolved)  # a check may learn what really ran
        if numerics.ok and workload.profile is not None and setting.folder is not None:
            profiled = workload.profile(setting.folder)
            resolved.update(workload.resolved)
            rows += numerics_rows(planned, arm, profiled)
        rows += numerics_rows(planned, arm, numerics)  # refuses a figure that is none
    except Exception as error:  # whatever a suite raises becomes a row; the sweep goes on
        resolved, cause = resolved | about(error), cause_of(error, Cause.BUILD)
        rows.append(row(planned, name, "failed", "", resolved, one_line(error), cause=cause))
        if isinstance(error, SpoiledError):
            raise
        return None
    if not numerics.ok:
        why, cause = f"numerics: {numerics.reason}", numerics.cause
        rows.append(row(planned, name, "failed", workload.metric, resolved, why, cause=cause))
        return None
    return arm


def _compile(planned: PlannedCase, arm: PreparedArm, setting: Setting, timer: Timer) -> list[Measurement]:
    """The first call of a compiled arm, timed apart from all others; again with warm caches where it can be."""
    compiling.prime(setting.device)
    work = arm.workload
    with compiling.empty_caches() if work.recompile is not None else nullcontext():
        watch = compiling.CompileWatch()
        seconds = _first_call(work, timer)
        arm.resolved.update(watch.summary())
        fault = watch.fault()
        if fault:
            return [row(planned, arm.name, "failed", work.metric, arm.resolved, fault, cause=Cause.COMPILE)]
        rows = [row(planned, arm.name, "ok", "compile_s", arm.resolved, samples=(seconds,))]
        if work.recompile is not None and setting.warm_compile:
            work.recompile()
            seconds = _first_call(work, timer)
            again = row(planned, arm.name, "ok", "compile_s", arm.resolved, samples=(seconds,))
            rows.append(replace(again, part="warm"))
    return rows


def _first_call(work: Workload, timer: Timer) -> float:
    """Seconds of a call that compiles."""
    with work.held():
        started = time.perf_counter()
        work.run()
        timer.synchronize()
        return time.perf_counter() - started
