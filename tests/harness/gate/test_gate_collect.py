"""Rows of several rounds become one. Oracle: the rows of each, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from harness.gate.collect import Collected
from harness.store.errors import Cause
from harness.store.measurement import Measurement


def row(metric: str = "sqnr_db", status: Any = "ok", **more: Any) -> Measurement:
    return Measurement("linear", "c", "a", "{}", metric, status, **more)


def together(*rows: Measurement) -> Measurement:
    """The one row of so many rounds."""
    side = Collected()
    for number, one in enumerate(rows):
        side.add(number, [one])
    (joined,) = side.measurements()
    return joined


@pytest.mark.parametrize(("metric", "worst"), [("sqnr_db", 27.0), ("rel_err_max", 31.0)])
def test_of_what_is_no_time_the_worst_round_stands(metric: str, worst: float) -> None:
    """More decibels are better, a larger error is worse."""
    joined = together(*(row(metric, samples=(value,)) for value in (29.0, 27.0, 31.0)))
    assert (joined.samples, joined.rounds) == ((worst,), ())


def test_what_failed_once_has_failed_for_its_own_cause() -> None:
    sound = row(samples=(29.0,))
    joined = together(sound, row(status="failed", reason="wrong", cause=Cause.OOM), sound)
    assert (joined.status, joined.reason, joined.samples, joined.cause) == (
        "failed",
        "wrong (round 1)",
        (),
        Cause.OOM,
    )


def test_an_arm_that_was_not_built_in_one_round_has_no_time_of_another_name() -> None:
    """Its metric is known where it was built alone."""
    side = Collected()
    timed = row("launch_us", samples=(1.0,), rounds=(0,), timing={"method": "m"}, regime="isolated")
    side.add(0, [timed, row(samples=(29.0,))])
    side.add(1, [row("time_ms", "failed", reason="no memory", cause=Cause.OOM)])
    joined = {one.metric: one.status for one in side.measurements()}
    assert joined == {"launch_us": "failed", "sqnr_db": "ok", "time_ms": "failed"}


def test_what_struck_one_round_struck_the_row() -> None:
    quiet, hit = ({"contended": struck, "late_samples": 1} for struck in (False, True))
    times = [row("time_ms", samples=(1.0,), rounds=(0,), timing=timing) for timing in (quiet, hit, quiet)]
    joined = together(*times)
    assert (joined.timing["contended"], joined.timing["late_samples"], joined.rounds) == (True, 3, (0, 1, 2))
