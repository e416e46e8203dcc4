"""Predicted beside measured. Oracle: the case and GPU that the test gives each figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from report_fixtures import frame

from harness.machine.hardware import named
from harness.report.predicted_and_measured import job_arms, lines
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from pathlib import Path

H200 = named("h200")


def one(suite: str, metric: str, ms: float, resolved: dict[str, Any], **axes: Any) -> Measurement:
    case = Case.of(suite, axes)
    return Measurement(
        suite, case.case_id, "rowwise", case.axes_json, metric, "ok", arm_fields=Arm("rowwise"), samples=(ms,),
        rounds=(0,), resolved=resolved,
    )  # fmt: skip


def predicted(ms: float, **axes: Any) -> Measurement:
    return one("scale", "predicted_step_ms", ms, {"tokens_per_s": 1.0, "mfu_mixed": 0.4}, **axes)


def timed(ms: float, **axes: Any) -> Measurement:
    return one("ab", "time_ms", ms, {"tokens_per_step": 1}, **axes)


def test_the_prediction_of_this_gpu_is_taken(tmp_path: Path) -> None:
    rows = [predicted(100.0, gpu="h200"), predicted(900.0, gpu="h100"), timed(110.0, x=1)]
    (arm,) = job_arms(frame(tmp_path, rows), H200)
    assert (arm.predicted["step_ms"], arm.block_ms, arm.left_out) == (100.0, 110.0, [])


def test_the_prediction_of_another_gpu_is_not_shown(tmp_path: Path) -> None:
    found = frame(tmp_path, [predicted(900.0, gpu="h100"), timed(110.0, x=1)])
    (arm,) = job_arms(found, H200)
    assert arm.predicted == {}
    assert "predicted for h100, and the rows are of" in lines(found, H200)[0]
    (arm,) = job_arms(found, None)
    assert arm.predicted == {}


def test_several_cases_are_not_mixed(tmp_path: Path) -> None:
    """Two predictions of this GPU and two blocks in one run: none is shown, and why is."""
    rows = [
        predicted(100.0, gpu="h200", nodes=1),
        predicted(900.0, gpu="h200", nodes=16),
        timed(110.0, x=1),
        timed(55.0, x=2),
    ]
    found = frame(tmp_path, rows)
    (arm,) = job_arms(found, H200)
    assert (arm.predicted, arm.block_ms) == ({}, None)
    (line,) = lines(found, H200)
    assert "2 cases of suite scale in this run, of which none is shown" in line
    assert "2 cases of suite ab" in line
    assert "ms" not in line.replace("cases", "")


JOB = {"model": "llama_tiny", "batch": 2, "seq": 256, "accumulation": 1, "checkpointing": "none"}


@pytest.mark.parametrize(
    ("axis", "value"), [("model", "llama3_8b"), ("batch", 4), ("seq", 512), ("accumulation", 2), ("checkpointing", "full")]
)  # fmt: skip
def test_the_prediction_of_another_job_is_not_shown(tmp_path: Path, axis: str, value: object) -> None:
    trained = one("divergence", "elapsed_s", 1.0, {}, **JOB, ranks=2, steps=100)
    other = predicted(900.0, gpu="h200", world=2, **{**JOB, axis: value})
    found = frame(tmp_path, [other, trained, timed(110.0, model="llama_tiny", ranks=2)])
    (arm,) = job_arms(found, H200)
    assert (arm.predicted, arm.block_ms) == ({}, 110.0)
    assert f"predicted for {axis}={value}, and the rows are of {axis}={JOB[axis]}" in lines(found, H200)[0]
    # Beside it the job's own prediction is the one that is taken
    own = predicted(100.0, gpu="h200", world=2, **JOB)
    (arm,) = job_arms(
        frame(tmp_path / "both", [other, own, trained, timed(110.0, model="llama_tiny", ranks=2)]), H200
    )
    assert (arm.predicted["step_ms"], arm.left_out) == (100.0, [])


def test_the_prediction_for_another_number_of_ranks_is_not_shown(tmp_path: Path) -> None:
    found = frame(
        tmp_path, [predicted(9.0, gpu="h200", world=16, **JOB), timed(110.0, model="llama_tiny", ranks=2)]
    )
    (arm,) = job_arms(found, H200)
    assert arm.predicted == {}
    assert arm.no_prediction == "predicted for world=16, and the rows are of ranks=2"
