"""Rows: what becomes of a case and an arm, as measurements; one way to make each kind."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.store import extensions
from harness.store.case import original_name
from harness.store.errors import Cause, MemoryShortageError
from harness.store.measurement import Measurement
from harness.timing.session import METERED_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.engine.plan import PlannedCase
    from harness.timing.config import Timing
    from harness.timing.workload import Numerics, Workload

REFUSES = "refuses: "  # before the words of what was to run and refused


@dataclass(slots=True)
class PreparedArm:
    """One arm of the case under way, built and found right."""

    name: str
    baseline: str
    workload: Workload
    resolved: dict[str, object]


def row(
    planned: PlannedCase,
    arm: str,
    status: Any,
    metric: str = "",
    resolved: Mapping[str, object] | None = None,
    reason: str = "",
    **more: Any,
) -> Measurement:
    """A row of one arm; its baseline is the suite's, of an arm timed again the arm itself. `more`: fields of a `Measurement`.

    The metric "" is the one that every arm of the suite has: the time, of a trial suite its `METRIC`, by default the loss.
    """
    name = original_name(arm)
    info = planned.suite.ARMS[name]
    resolved = {**(resolved or {})}
    if any(map(extensions.names, extensions.TABLES)):
        from harness.suites.extended import used

        others = used(planned.case, info.record(name), resolved)
        resolved |= {"extensions": others} if others else {}
    return Measurement(
        suite=planned.case.suite,
        case_id=planned.case.case_id,
        arm=arm,
        arm_fields=replace(info.record(name), control=arm != name),
        baseline=info.baseline if arm == name else name,
        axes=planned.case.axes_json,
        seed=planned.case.seed,
        metric=metric or (getattr(planned.suite, "METRIC", "loss") if planned.is_trial else "time_ms"),
        status=status,
        resolved=resolved,
        reason=reason,
        **more,
    )


def all_arms(planned: PlannedCase, status: str, reason: str, cause: Cause) -> list[Measurement]:
    """One row for each arm of a case, alike but for the arm."""
    return [row(planned, arm, status, reason=reason, cause=cause) for arm in planned.arms]


def skipped_rows(planned: PlannedCase) -> list[Measurement]:
    """A row for each arm that cannot run the case here, with the reason."""
    return [
        row(planned, arm, why.status, reason=why.reason, cause=why.cause)
        for arm, why in planned.unsupported.items()
    ]


def trial_rows(planned: PlannedCase, arm: str, made: Mapping[str, Any]) -> list[Measurement]:
    """The curves of a run, and why there is none if it failed; `made`: see `harness.engine.arm_process.trial`."""
    resolved, cause = made["resolved"], Cause(made["cause"])
    rows = [
        row(planned, arm, "ok", metric, resolved, samples=tuple(samples), rounds=tuple(steps), part=part)
        for metric, samples, steps, part in made["series"]
    ]
    if made["failure"]:
        more = {"traceback": made["trace"]} if made["trace"] else {}
        rows.append(row(planned, arm, "failed", "", resolved | more, made["failure"], cause=cause))
    if made["refusal"]:
        why = f"{REFUSES}{made['refusal']}"
        rows.append(row(planned, arm, "skipped", "", resolved, why, cause=Cause.REFUSED))
    return rows


def about(error: BaseException) -> dict[str, object]:
    """What is known of an exception beside its one line, for `resolved`."""
    if isinstance(error, MemoryShortageError):
        return error.facts
    return {"traceback": "".join(traceback.format_exception(error))[-4000:]}


def time_row(
    planned: PlannedCase,
    arm: PreparedArm,
    timing: Timing,
    unproven: tuple[str, Cause],
    state: Mapping[str, object],
) -> Measurement:
    """The samples of a timed arm and the state of the machine before and after, or why there are none.

    `unproven`: why they do not count, and the cause.
    """
    work = arm.workload
    fault, cause = (timing.failure, timing.cause) if timing.failure else unproven
    if fault:
        resolved = arm.resolved | dict(work.resolved)  # the workload may have said why
        return row(
            planned, arm.name, "failed", work.metric, resolved, fault, regime=timing.regime, cause=cause
        )
    return row(
        planned,
        arm.name,
        "ok",
        work.metric,
        arm.resolved,
        samples=tuple(timing.samples_ms),
        regime=timing.regime,
        rounds=tuple(timing.rounds),
        sample_clock_mhz=tuple(timing.sample_clock_mhz),
        flops=work.flops,
        bytes_moved=work.bytes_moved,
        timing={**timing.as_json_dict(), **state},
    )


def split_row(
    planned: PlannedCase, arm: PreparedArm, timing: Timing, whole: Measurement
) -> list[Measurement]:
    """The row of what the samples took up to the point that the closure marks; none where it marks none.

    Args:
        planned: the case.
        arm: which.
        timing: with the samples.
        whole: the row of the whole samples.
    """
    if not arm.workload.split_metric or whole.status != "ok":
        return []
    if not timing.split_ms:
        why = "the point inside of a step was not passed in every sample"
        return [row(planned, arm.name, "skipped", arm.workload.split_metric, arm.resolved, why)]
    return [replace(whole, metric=arm.workload.split_metric, samples=timing.split_ms)]


def partial_row(whole: Measurement, least: int) -> Measurement:
    """A row of a case that is still measured, marked as such; a failed one stays as it is.

    Args:
        whole: as if the case ended here.
        least: rounds that it is to have.
    """
    if whole.status != "ok":
        return whole
    rounds = len(set(whole.rounds))
    why = f"partial: {rounds} of at least {least} rounds, then it was cut off; resume=RUN_ID measures the case again"
    return replace(whole, status="partial", reason=why)


def energy_row(planned: PlannedCase, arm: PreparedArm, timing: Timing, device: str) -> Measurement:
    """Joules per token by round; the rounds in which the meter failed, or that it can't resolve, are left out."""
    read = {i: j / arm.workload.tokens for i, j in enumerate(timing.joules) if not math.isnan(j)}
    if not read or arm.workload.unmetered:
        why = arm.workload.unmetered or f"no energy meter could be read on {device}"
        if timing.joules and not arm.workload.unmetered:
            why = (
                f"blocks of less than {METERED_S:g} s, too short for an energy meter that moves ten times a second; "
                f"timing.block_ms={1250 * METERED_S:g} with a timing.max_seconds to match makes them longer"
            )
        return row(planned, arm.name, "skipped", "joules_per_token", arm.resolved, why)
    joules: dict[str, Any] = {"samples": tuple(read.values()), "rounds": tuple(read), "regime": timing.regime}
    return row(planned, arm.name, "ok", "joules_per_token", arm.resolved, **joules)


def numerics_rows(planned: PlannedCase, arm: PreparedArm, numerics: Numerics) -> list[Measurement]:
    """The figures of the check; a figure that broke its bound is a failure with the figure in the reason."""
    figures = {(metric, ""): value for metric, value in numerics.values.items()} | dict(numerics.parts)
    rows = []
    for (metric, part), value in figures.items():
        if numerics.ok:
            outcome: dict[str, Any] = {"samples": (float(value),)}
        else:
            outcome = {"reason": f"{value:.6g}; {numerics.reason}", "cause": numerics.cause}
        status = "ok" if numerics.ok else "failed"
        rows.append(row(planned, arm.name, status, metric, arm.resolved, part=part, **outcome))
    return rows + [
        row(planned, arm.name, "skipped", metric, arm.resolved, why)
        for metric, why in numerics.skipped.items()
    ]
