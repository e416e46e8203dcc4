"""Predicted beside measured. Oracle: the case and GPU that the test gives each figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from report_fixtures import frame

from harness import store
from harness.machine.hardware import named
from harness.report.predicted_and_measured import job_arms, job_table, lines, lines_by_machine
from harness.report.runs import load
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


def test_the_prediction_of_this_gpu_is_taken_and_of_another_not_shown(tmp_path: Path) -> None:
    rows = [predicted(900.0, gpu="h100"), timed(110.0, x=1)]
    (arm,) = job_arms(frame(tmp_path / "both", [predicted(100.0, gpu="h200"), *rows]), H200)
    assert (arm.predicted["step_ms"], arm.block_ms, arm.left_out) == (100.0, 110.0, [])
    found = frame(tmp_path, rows)
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
    ("axis", "value"), [("model", "llama3_8b"), ("batch", 4), ("seq", 512), ("accumulation", 2), ("checkpointing", "full"), ("world", 16)]
)  # fmt: skip
def test_the_prediction_of_another_job_is_not_shown(tmp_path: Path, axis: str, value: object) -> None:
    trained = one("divergence", "elapsed_s", 1.0, {}, **JOB, ranks=2, steps=100)
    other = predicted(900.0, gpu="h200", **{"world": 2, **JOB, axis: value})
    found = frame(tmp_path, [other, trained, timed(110.0, model="llama_tiny", ranks=2)])
    (arm,) = job_arms(found, H200)
    assert (arm.predicted, arm.block_ms) == ({}, 110.0)
    own = f"{axis}={JOB[axis]}" if axis in JOB else "ranks=2"
    assert f"predicted for {axis}={value}, and the rows are of {own}" in lines(found, H200)[0]
    # Beside it the job's own prediction is the one that is taken
    mine = predicted(100.0, gpu="h200", world=2, **JOB)
    (arm,) = job_arms(
        frame(tmp_path / "both", [other, mine, trained, timed(110.0, model="llama_tiny", ranks=2)]), H200
    )
    assert (arm.predicted["step_ms"], arm.left_out) == (100.0, [])


@pytest.mark.parametrize(
    ("last", "steps_s", "expected"),
    [
        (6, [0.5] * 6 + [9.0, 4.0, 4.0, 4.0], "training 4,000 ms, mixed MFU 25.0 %"),
        (9, [0.5] * 9 + [9.0], "no training step is shown"),
    ],
)
def test_steps_of_the_gpu_before_are_not_divided_by_the_peak_of_this_one(
    tmp_path: Path, last: int, steps_s: list[float], expected: str
) -> None:
    """Made on a faster GPU, continued on an H100, which needs one second for these FLOPs at its peak; 9 s compile there."""
    ends = tuple(sum(steps_s[: n + 1]) for n in range(len(steps_s)))
    curve = Measurement(
        "divergence", "c", "base", "{}", "elapsed_s", "ok", arm_fields=Arm("base"), samples=ends,
        rounds=tuple(range(len(ends))), flops={"bf16": 989.4e12}, resolved={"ranks": 2, "resumed_from_steps": [2, last]},
    )  # fmt: skip
    env = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.2, "device": "cuda"}
    about = {"made_with": {}, "continued_with_other": [{"GPU": ["NVIDIA B200", env["gpu"]]}]}
    writer = store.RunWriter(tmp_path / "r", run_id="r", sweep="s", env_id="e", env=env, about=about)
    writer.append([predicted(9.0, gpu="b200"), curve])
    writer.close("finished")
    said = lines_by_machine(store.read(tmp_path / "r"), store.read_about(tmp_path / "r"))
    (line,) = [line for line in said if line.startswith("bf16")]
    assert expected in line, line
    (machine,) = load([tmp_path / "r"], tmp_path).machines
    table = job_table(machine)
    titles = [column.title for column in table.columns]
    (row,) = [r for r in table.rows if r[0].text == "bf16"]
    shown = {title: cell.text for title, cell in zip(titles, row, strict=True) if "training" in title}
    trained = {"step in training (ms)": "4,000", "MFU in training": "25 %"}
    assert {title: shown.get(title) for title in trained} == (
        trained if last == 6 else dict.fromkeys(trained)
    )
    assert f"step {last}, where the run was continued with another GPU" in table.caption
    as_it_was = job_arms(machine.frame, machine.device)  # without a word of another GPU all steps count
    assert {arm.training_ms for arm in as_it_was if arm.name == "bf16"} == {500.0}
