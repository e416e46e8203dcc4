"""Rows of several processes become one. Oracle: what each process said, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from harness.gate.collect import Collected
from harness.store.errors import Cause
from harness.store.measurement import Measurement

ABOUT = {"suite": "linear", "case_id": "c", "arm": "a", "baseline": "", "axes": "{}", "seed": 0}


def together(*said: dict[str, Any], metric: str = "sqnr_db") -> Measurement:
    """The one row of so many rounds; each holds what a worker's answer to `prepare` does."""
    sides = Collected()
    for number, words in enumerate(said):
        sides.take(number, [ABOUT | {"metric": metric, "status": "ok"} | words])
    (row,) = sides.measurements()
    return row


@pytest.mark.parametrize(("metric", "worst"), [("sqnr_db", 27.0), ("rel_err_max", 31.0)])
def test_of_what_is_no_time_the_worst_process_stands(metric: str, worst: float) -> None:
    """More decibels are better, a larger error is worse."""
    row = together(*({"samples": [value]} for value in (29.0, 27.0, 31.0)), metric=metric)
    assert (row.samples, row.rounds) == ((worst,), ())


def test_what_failed_once_has_failed_for_the_workers_cause() -> None:
    """In its preparation, or in a block of times; a cause of another commit is an error."""
    sound = {"samples": [29.0]}
    for word, cause in (("oom", Cause.OOM), ("of_2031", Cause.ERROR)):
        row = together(sound, {"status": "failed", "reason": "wrong", "cause": word}, sound)
        assert (row.status, row.reason, row.samples, row.cause) == ("failed", "wrong (round 1)", (), cause)
        sides = Collected()
        sides.take(0, [ABOUT | {"metric": "time_ms", "status": "ok"}])
        sides.time(0, "c", {"a": {"fault": "broke", "cause": word}})
        (row,) = sides.measurements()
        assert (row.status, row.cause) == ("failed", cause)
