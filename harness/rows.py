"""Rows: what becomes of a case and an arm, as measurements; one way to make each kind."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.errors import MemoryShortageError
from harness.measurement import Measurement
from harness.workload import TrialSuite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.plan import PlannedCase
    from harness.trials import Done

AGAIN = ":again"  # a baseline timed a second time in the same rounds


def is_trial(planned: PlannedCase) -> bool:
    """Whether each arm of the case is a run of its own."""
    return isinstance(planned.suite, TrialSuite)


def row(
    planned: PlannedCase,
    arm: str,
    status: Any,
    metric: str = "",
    resolved: Mapping[str, object] | None = None,
    reason: str = "",
    samples: tuple[float, ...] = (),
    regime: str = "",
) -> Measurement:
    """A row of one arm; its baseline is the suite's, of an arm timed again the arm itself.

    The metric "" is the one that every arm of the suite has: the time, of a trial suite the loss.
    """
    name = arm.removesuffix(AGAIN)
    return Measurement(
        suite=planned.case.suite,
        case_id=planned.case.case_id,
        arm=arm,
        baseline=planned.suite.ARMS[name].baseline if arm == name else name,
        axes=planned.case.axes_json,
        seed=planned.case.seed,
        metric=metric or ("loss" if is_trial(planned) else "time_ms"),
        status=status,
        regime=regime,
        resolved=resolved or {},
        samples=samples,
        reason=reason,
    )


def all_arms(planned: PlannedCase, status: str, reason: str) -> list[Measurement]:
    """The same row for each arm of a case."""
    return [row(planned, arm, status, reason=reason) for arm in planned.arms]


def trial_rows(planned: PlannedCase, ended: Done) -> list[Measurement]:
    """The curves of a run, and why there is none if it failed."""
    arm, trial = ended.task.arm, ended.trial
    rows = [
        replace(
            row(planned, arm, "ok", s.metric, trial.resolved, samples=s.samples), rounds=s.steps, part=s.part
        )
        for s in trial.series
    ]
    if trial.failure:
        resolved = {**trial.resolved} | ({"traceback": ended.trace} if ended.trace else {})
        rows.append(row(planned, arm, "failed", resolved=resolved, reason=trial.failure))
    return rows


def about(error: BaseException) -> dict[str, object]:
    """For `resolved`: what is known of an exception beside its one line."""
    if isinstance(error, MemoryShortageError):
        return error.facts
    return {"traceback": "".join(traceback.format_exception(error))[-4000:]}
