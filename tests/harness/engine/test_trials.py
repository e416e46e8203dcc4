"""Runs of trial suites through executor and command line. Oracle: what the toy suite counts, and the store's contract."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pandas as pd
import pytest
import toy_trials
from toy_trials import STEPS, ToyTrials
from trial_runs import ARMS, WHOLE, curves, execute

from harness.cli import run
from harness.engine import bench, executor
from harness.engine.progress import _Log
from harness.engine.stages import Frame
from harness.engine.tasks import Task
from harness.timing.workload import Suite, TrialSuite, Unsupported


def test_the_suites_of_the_two_kinds_are_told_apart() -> None:
    assert isinstance(ToyTrials(), TrialSuite)
    assert not isinstance(ToyTrials(), Suite)
    kinds = {name: isinstance(suite, TrialSuite) for name, suite in run.SUITES.items()}
    assert all(
        kinds.pop(name)
        for name in (
            "allgather",
            "divergence",
            "links",
            "parallel",
            "scale",
            "smoke_kernels",
            "smoke_layers",
            "tests",
        )
    )
    assert not any(kinds.values())


@pytest.mark.parametrize("lanes", [0, 2])
def test_every_run_ends_as_curves(lanes: int, tmp_path: Path) -> None:
    outcome, frame = execute(tmp_path, ToyTrials(), lanes=lanes)
    assert outcome.state == "finished"
    assert curves(frame) == WHOLE
    rows = frame[frame["metric"] == "amax"]
    assert set(rows["part"]) == {"layers.0:input"}
    assert rows["rounds"].map(list).tolist() == [list(range(STEPS))] * 8
    assert set(frame[frame["arm"] == "tensorwise"]["baseline"]) == {"base"}
    assert not (tmp_path / "_checkpoints").exists()


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_run_that_raises_fails_alone(lanes: int, tmp_path: Path) -> None:
    outcome, frame = execute(tmp_path, ToyTrials({"tensorwise": "raise"}), lanes=lanes)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[1] != "tensorwise"}
    failed = frame[frame["status"] == "failed"]
    assert failed["arm"].tolist() == ["tensorwise"] * 2
    assert set(failed["metric"]) == {"loss"}
    assert set(failed["reason"]) == {"RuntimeError: boom"}
    assert failed["resolved"].str.contains("toy_trials.py").all()  # the traceback
    assert outcome.statuses["failed"] == 2
    assert not (tmp_path / "_checkpoints").exists()


class LostDevice:
    """A CPU timer whose device is the toy suite's."""

    def synchronize(self) -> None:
        if toy_trials.fault:
            raise RuntimeError(toy_trials.fault[0])


def test_a_lost_device_is_named_and_resume_makes_the_runs_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_trials, "fault", [])
    monkeypatch.setattr(bench.Bench, "lost", bench.Bench.lost)
    suite = ToyTrials({"tensorwise": "lose"})
    _, frame = execute(tmp_path, suite, seeds=1, timer=LostDevice())
    assert curves(frame) == {(0, "base"): [0.0] * STEPS}
    reasons = frame[frame["status"] == "failed"].set_index("arm")["reason"]
    assert reasons["tensorwise"].startswith("RuntimeError: CUDA error")
    for arm in ("rowwise", "broken"):
        assert reasons[arm].startswith("the device was lost in case ")
    toy_trials.fault.clear()
    _, frame = execute(tmp_path, suite, seeds=1, resume=True)
    assert set(curves(frame)) == {(0, arm) for arm in ARMS if arm != "tensorwise"}


def test_memory_that_cannot_be_released_is_a_lost_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(bench, "release_memory", refuse)
    outcome, frame = execute(tmp_path, ToyTrials(), seeds=1, device="cuda")
    assert outcome.state == "finished"
    assert curves(frame) == {(0, "base"): [0.0] * STEPS}
    assert frame["reason"].str.startswith("the device was lost").sum() == 3


@pytest.mark.parametrize(
    ("device", "lanes", "told"), [("cuda", 2, {2}), ("cuda", 1, {None}), ("cpu", 2, {None})]
)
def test_runs_that_share_a_gpu_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, lanes: int, told: set[int | None]
) -> None:
    """Their seconds are no speed; each run of a CPU has a core of its own."""
    monkeypatch.setattr(executor._Run, "_by_workers", lambda self, wanted, places: self._here(wanted))
    _, frame = execute(tmp_path, ToyTrials(), seeds=1, device=device, lanes=lanes)
    good = frame[frame["status"] == "ok"]
    assert {json.loads(resolved).get("runs_on_this_gpu") for resolved in good["resolved"]} == told


def test_a_process_that_lost_its_device_makes_no_more_runs(tmp_path: Path) -> None:
    """Four arms of two seeds on two processes: those that follow a fault find a new process."""
    _, frame = execute(tmp_path, ToyTrials({"tensorwise": "lose"}), lanes=2)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[1] != "tensorwise"}


def test_a_curve_that_ends_early_is_a_result_and_one_that_never_began_a_failure(tmp_path: Path) -> None:
    _, frame = execute(tmp_path, ToyTrials({"rowwise": "nan", "broken": "nothing"}), seeds=1)
    assert curves(frame)[0, "rowwise"] == [0.0] * 3
    (reason,) = frame[frame["arm"] == "broken"]["reason"]
    assert reason == "nothing was trained: loss is nan at step 0"


def test_a_process_that_dies_takes_its_own_run_only_which_goes_on_from_its_file(tmp_path: Path) -> None:
    outcome, frame = execute(tmp_path, ToyTrials({"tensorwise": "die"}), lanes=2)
    assert curves(frame) == WHOLE
    assert set(outcome.statuses) == {"ok"}
    tries = frame.groupby("arm")["tries"].agg(set).to_dict()
    assert tries == {arm: {2} if arm == "tensorwise" else {1} for arm in ARMS}
    begun = {json.loads(r)["begun"] for r in frame[frame["arm"] == "tensorwise"]["resolved"]}
    assert begun == {3}


def test_a_run_whose_process_dies_twice_has_failed_and_resume_goes_on_from_its_file(tmp_path: Path) -> None:
    suite = ToyTrials({"tensorwise": "die 2"})
    outcome, frame = execute(tmp_path, suite, lanes=2)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[1] != "tensorwise"}
    (reason,) = set(frame[frame["status"] == "failed"]["reason"])
    assert reason.startswith("its process died twice (signal 9, SIGKILL) after ")
    assert reason.endswith("; resume=RUN_ID runs it again")
    assert outcome.statuses["failed"] == 2
    outcome, frame = execute(tmp_path, suite, resume=True, lanes=2)
    assert curves(frame) == WHOLE
    assert (frame["status"] == "ok").all()
    begun = {json.loads(r)["begun"] for r in frame[frame["arm"] == "tensorwise"]["resolved"]}
    assert begun == {3}
    assert not (tmp_path / "_checkpoints").exists()


def test_ctrl_c_keeps_finished_runs_and_resume_makes_the_others(tmp_path: Path) -> None:
    outcome, frame = execute(tmp_path, ToyTrials({"rowwise": "stop"}))
    assert outcome.state == "interrupted"
    assert curves(frame) == {key: WHOLE[key] for key in ((0, "base"), (0, "tensorwise"))}
    before = frame.drop(columns=["attempt", "created_at"])
    outcome, frame = execute(tmp_path, ToyTrials(), resume=True)
    assert curves(frame) == WHOLE
    assert not frame.duplicated(["case_id", "arm", "metric", "part"]).any()
    kept = frame[frame["arm"].isin(["base", "tensorwise"]) & frame["axes"].str.contains('"seed":0')]
    pd.testing.assert_frame_equal(
        kept.drop(columns=["attempt", "created_at"]).reset_index(drop=True), before, check_exact=True
    )
    (begun,) = {json.loads(r)["begun"] for r in frame[frame["arm"] == "rowwise"]["resolved"]} - {0}
    assert begun == 3
    outcome, _ = execute(tmp_path, ToyTrials(), resume=True)
    assert not outcome.statuses  # nothing was left


def test_ctrl_c_ends_the_other_processes(tmp_path: Path) -> None:
    def stop(task: Task, done: int, total: int) -> None:
        if task.arm == "rowwise" and done:
            raise KeyboardInterrupt

    outcome, frame = execute(tmp_path, ToyTrials({"rowwise": "wait"}), seeds=1, lanes=2, on_step=stop)
    assert outcome.state == "interrupted"
    assert multiprocessing.active_children() == []
    assert "rowwise" not in set(frame["arm"])
    _, frame = execute(tmp_path, ToyTrials(), seeds=1, resume=True, lanes=2)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[0] == 0}


def test_a_run_resumed_twice_keeps_what_each_attempt_finished(tmp_path: Path) -> None:
    for arm in ("tensorwise", "rowwise"):
        execute(tmp_path, ToyTrials({arm: "stop"}), seeds=1, resume=bool(list(tmp_path.iterdir())))
    _, frame = execute(tmp_path, ToyTrials(), seeds=1, resume=True)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[0] == 0}
    assert len(frame) == 8


@pytest.mark.usefixtures("disk_full_at_third_write")
def test_a_full_disk_ends_the_run_with_the_earlier_rows_intact(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="closed without compacting"):
        outcome, frame = execute(tmp_path, ToyTrials())
    assert outcome.state == "failed"
    assert "No space left on device; the earlier rows are intact" in outcome.message
    assert len(curves(frame)) == 2


@pytest.mark.parametrize("lanes", [0, 2])
def test_runs_past_the_time_budget_are_rows_that_say_so_and_resume_makes_them(
    lanes: int, tmp_path: Path
) -> None:
    ticks = iter(range(0, 10**6, 10))
    outcome, frame = execute(
        tmp_path, ToyTrials(), lanes=lanes, budget_s=35, clock=lambda: float(next(ticks))
    )
    assert outcome.statuses["skipped"] == 5
    assert frame[frame["status"] == "skipped"]["reason"].str.startswith("time budget of 35 s").all()
    _, frame = execute(tmp_path, ToyTrials(), resume=True, lanes=lanes)
    assert (frame["status"] == "ok").all()
    assert curves(frame) == WHOLE


def test_an_arm_that_this_device_lacks_is_a_skipped_row_once(tmp_path: Path) -> None:
    suite = ToyTrials(refuses={"rowwise": Unsupported("device", "needs sm_90")})
    execute(tmp_path, ToyTrials({"broken": "stop"}, refuses=suite.refuses), seeds=1)
    _, frame = execute(tmp_path, suite, seeds=1, resume=True)
    (row,) = frame[frame["arm"] == "rowwise"].to_dict("records")
    assert (row["status"], row["metric"], row["reason"]) == ("skipped", "loss", "needs sm_90")


def test_progress_counts_steps_as_parts_of_runs(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def on_step(task: Task, done: int, total: int) -> None:
        seen.append((task.arm, done, total))

    execute(tmp_path, ToyTrials(), seeds=1, on_step=on_step)
    assert seen[: STEPS + 1] == [("base", 0, 0), *(("base", i, STEPS) for i in range(1, STEPS + 1))]
    assert [arm for arm, done, _ in seen if done == 0] == [*ARMS]


def test_a_log_tells_the_step_and_the_time_left_now_and_then() -> None:
    lines: list[str] = []

    class Console:
        def print(self, text: str, **_: object) -> None:
            lines.append(text)

    now = [0.0]
    log = _Log(Console(), lambda: now[0])
    log(Frame("begins", "", 0.0, 0.0, 160.0), True)
    for now[0], left_s in ((10.0, 150.0), (40.0, 120.0), (60.0, 100.0), (80.0, 80.0)):
        log(Frame("case", f"at {now[0]:.0f}", 0.0, now[0], left_s), False)
    assert lines == [
        "begins",
        "case: at 40, 25 % of the time is over, about 120 s left",
        "case: at 80, 50 % of the time is over, about 80 s left",
    ]
