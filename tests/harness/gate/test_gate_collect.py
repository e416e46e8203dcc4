"""Rows of several processes become one. Oracle: what each process said, by hand."""

from __future__ import annotations

import pytest

from harness.gate.collect import Collected
from harness.store.cause import Cause


def said(metric: str, *samples: float) -> dict[str, object]:
    """A row as a worker's answer to `prepare` holds it."""
    about = {"suite": "linear", "case_id": "c", "arm": "a", "baseline": "", "axes": "{}", "seed": 0}
    return about | {"metric": metric, "status": "ok", "samples": list(samples)}


@pytest.mark.parametrize(("metric", "worst"), [("sqnr_db", 27.0), ("rel_err_max", 31.0)])
def test_of_what_is_no_time_the_worst_process_stands(metric: str, worst: float) -> None:
    """More decibels are better, a larger error is worse."""
    sides = Collected()
    for number, value in enumerate((29.0, 27.0, 31.0)):
        later = Collected()
        later.take(number, [said(metric, value)])
        sides.merge(later)
    (row,) = sides.measurements()
    assert row.samples == (worst,)
    assert row.rounds == ()


def test_what_failed_once_has_failed() -> None:
    sides = Collected()
    for number, status in enumerate(("ok", "failed", "ok")):
        later = Collected()
        later.take(number, [said("sqnr_db", 29.0) | {"status": status, "reason": "wrong"}])
        sides.merge(later)
    (row,) = sides.measurements()
    assert (row.status, row.reason, row.samples) == ("failed", "wrong (round 1)", ())


@pytest.mark.parametrize(
    ("causes", "cause"),
    [({"causes": {"a": "compile"}}, "compile"), ({"causes": {"a": "of_2031"}}, "error"), ({}, "run")],
    ids=["known", "of another commit", "a worker without causes"],
)
def test_the_cause_of_a_block_is_the_workers(causes: dict[str, object], cause: str) -> None:
    sides = Collected()
    sides.take(0, [said("time_ms")])
    sides.time(0, "c", {"samples": {}, "faults": {"a": "broke"}, **causes})
    (row,) = sides.measurements()
    assert (row.status, row.cause) == ("failed", Cause(cause))


@pytest.mark.parametrize(("word", "cause"), [("oom", Cause.OOM), ("of_2031", Cause.ERROR)])
def test_the_cause_of_a_failed_build_is_the_workers(word: str, cause: Cause) -> None:
    sides = Collected()
    sides.take(0, [said("sqnr_db") | {"status": "failed", "reason": "broke", "cause": word}])
    (row,) = sides.measurements()
    assert row.cause is cause
