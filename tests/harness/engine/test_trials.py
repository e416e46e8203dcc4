"""Runs of trial suites through executor and command line. Oracle: what the toy suite counts, and the store's contract."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import toy_trials
from toy_trials import STEPS, ToyTrials

from harness import store
from harness.__main__ import main
from harness.cli import run
from harness.engine import bench, executor
from harness.engine.executor import Executor, Outcome, Place
from harness.engine.plan import Plan, make_plan
from harness.engine.progress import _Log
from harness.engine.resume import stored_arms, stored_cases
from harness.engine.stages import Frame
from harness.engine.tasks import Task
from harness.engine.workers import Conditions
from harness.timing.rounds import TimingConfig, timer_for
from harness.timing.workload import Suite, TrialSuite, Unsupported

ARMS = ("base", "tensorwise", "rowwise", "broken")


def plan(suite: ToyTrials, seeds: int = 2, **changes: Any) -> Plan:
    config: dict[str, Any] = {
        "name": "toy", "suite": "toy", "axes": {"seed": list(range(seeds))}, "shapes": [], "arms": [], "parts": {},
        "model": None, "seed": 0, "device": "cpu",
    }  # fmt: skip
    return make_plan(config | changes, {"toy": suite})


def writer(folder: Path) -> store.RunWriter:
    return store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})


def execute(
    folder: Path, suite: ToyTrials, *, seeds: int = 2, resume: bool = False, lanes: int = 0, **changes: Any
) -> tuple[Outcome, pd.DataFrame]:
    made = plan(suite, seeds)
    done = stored_cases(folder, made) if resume else set()
    done_arms = stored_arms(folder, made, done) if resume else set()
    into = writer(folder)
    places = [Place(Conditions.here())] if lanes else []  # none: all in this process
    given = {"device": "cpu", "timer": timer_for("cpu"), "places": places, "lanes": lanes} | changes
    outcome = Executor(timing=TimingConfig(), **given).run(made, into, done, done_arms)
    into.close(outcome.state)
    return outcome, store.read(folder)


def curves(frame: pd.DataFrame) -> dict[tuple[int, str], list[float]]:
    """Losses of successful runs: (seed, arm) -> loss."""
    good = frame[(frame["metric"] == "loss") & (frame["status"] == "ok")]
    return {
        (json.loads(row.axes)["seed"], row.arm): list(row.samples) for row in good.itertuples(index=False)
    }


WHOLE = {(seed, arm): [float(seed)] * STEPS for seed in (0, 1) for arm in ARMS}


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


SWEEP = """\
# Does the toy train?
suite: toy_trials
axes: {seed: [0, 1]}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyTrials:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toyt.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    suite = ToyTrials()
    monkeypatch.setitem(run.SUITES, "toy_trials", suite)
    return suite


def runs(capsys: pytest.CaptureFixture[str]) -> pd.DataFrame:
    out = capsys.readouterr().out.splitlines()
    assert out[-2].startswith("results")
    assert out[-1].startswith("report")
    return store.read(out[-2].split()[-1])


def test_the_command_line_makes_runs_and_reports_them(
    command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=toyt", "device=cpu", "workers=1", "model=nano"]) == 0
    frame = runs(capsys)
    assert curves(frame) == WHOLE
    assert frame["axes"].str.contains('"model":"nano"').all()


@pytest.mark.parametrize("spread", [[], ["shard=0/1"]])
def test_what_one_shard_stored_of_a_case_is_not_made_again_by_another(
    spread: list[str], command: ToyTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third of four arms; the rest is made without shards, or by those of another number."""
    words = ["sweep=toyt", "device=cpu", "isolate=false", "quiet=true", "axes.seed=0"]
    monkeypatch.setitem(run.SUITES, "toy_trials", ToyTrials({"rowwise": "stop"}))
    assert main([*words, "run_id=r1", "shard=0/1"]) == 2
    whole = Path("results/toyt/r1")
    (whole / "shard-0-of-1").rename(whole / "shard-0-of-2")
    monkeypatch.setitem(run.SUITES, "toy_trials", command)
    assert main([*words, "resume=r1", *spread]) == 0
    frame = store.read(whole, all_attempts=True)
    assert not frame.duplicated(["case_id", "arm", "metric", "part"]).any()
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[0] == 0}


@pytest.mark.parametrize(
    ("words", "arms"),
    [
        (["train.mixed_precision=bf16"], {"base"}),
        (["train.mixed_precision=fp8"], {"base", "tensorwise", "broken"}),
        (["train.mixed_precision=FP8", "train.recipe=rowwise"], {"base", "rowwise", "broken"}),
        (["train.mixed_precision=float8", "arms=[base,rowwise,tensorwise]"], {"base", "tensorwise"}),
    ],
)
def test_mixed_precision_and_recipe_choose_the_arms(
    words: list[str], arms: set[str], command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=toyt", "device=cpu", "workers=1", *words]) == 0
    assert set(runs(capsys)["arm"]) == arms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.mixed_precision=fp9"], "unknown train.mixed_precision 'fp9' (nearest: fp8)"),
        (["train.mixed_precision=bf16", "arms=[rowwise]"], "leaves none of the arms rowwise"),
        (["train.recipe=rowwise"], "train.recipe=rowwise needs train.mixed_precision=fp8"),
        (["train.mixed_precision=fp8", "train.recipe=rowise"], "unknown train.recipe 'rowise' (nearest: rowwise)"),
        (["train.mixd_precision=fp8"], "unknown key 'train.mixd_precision' (nearest: train.mixed_precision)"),
        (["data=stdlib"], "data=stdlib means nothing to sweep 'toyt': no suite of it has an axis 'data'"),
        (["train.profile=true"], "train.profile=True means nothing to sweep 'toyt'"),
        (["modle=nano"], "unknown key 'modle' (nearest: model)"),
        (["workers=0"], "workers=0: expected an integer of at least 1"),
        (["axes.seed=[-1]"], "axes.seed=-1: expected an integer of at least 0"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_and_nothing_is_written(
    words: list[str], message: str, command: ToyTrials, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["sweep=toyt", "device=cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_schedule_may_hold_what_hydra_reads_otherwise(
    command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "warmup_bf16:0.1@layers.*:grad_weight,cooldown_bf16:5"
    assert main(["sweep=toyt", "device=cpu", "workers=1", f"schedule={text}"]) == 0
    assert json.loads(runs(capsys)["axes"].iloc[0])["schedule"] == text


def test_a_model_of_the_users_own_becomes_an_axis(
    command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=my.build", "model.batch=my.batch", "model.width=8"]
    assert main(["sweep=toyt", "device=cpu", "workers=1", *words]) == 0
    axes = json.loads(runs(capsys)["axes"].iloc[0])
    assert axes["model"] == '{"_target_":"my.build","batch":"my.batch","width":8}'


CHILD = """
import sys
from harness.cli import run
from harness.__main__ import main
from toy_trials import ToyTrials
run.SUITES["toy_trials"] = ToyTrials(ACTS)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def sweep_in_a_process(folder: Path, acts: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a sweep of two runs at once, each in a process of its own."""
    (folder / "child.py").write_text(CHILD.replace("ACTS", repr(acts)))
    base = [sys.executable, str(folder / "child.py"), "sweep=toyt", "device=cpu", "workers=2"]
    return base, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def started(
    base: list[str], environment: dict[str, str], folder: Path, arm: str, steps: int
) -> tuple[subprocess.Popen[bytes], Path]:
    """The sweep under way, once a run of `arm` has made so many steps, and the file in which that run says so."""
    process = subprocess.Popen(base, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while True:
        for place in folder.glob(f"results/toyt/*/_checkpoints/*-{arm}/place"):
            if (text := place.read_text()) and int(text) >= steps:
                return process, place
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_no_process_outlives_a_killed_sweep(command: ToyTrials, tmp_path: Path) -> None:
    """Not even one whose run reports nothing: what it would still write is the next sweep's."""
    process, _ = started(*sweep_in_a_process(tmp_path, {"tensorwise": "hang"}), tmp_path, "tensorwise", 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_what_a_killed_sweep_had_no_time_to_remove_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "_checkpoints" / "0123456789abcdef-base"
    left.mkdir(parents=True)
    (left / "place").write_text("5")
    execute(tmp_path, ToyTrials())
    assert not left.parent.exists()


@pytest.mark.slow
def test_a_sweep_killed_from_outside_goes_on_where_it_was(command: ToyTrials, tmp_path: Path) -> None:
    """SIGKILL with two processes at work: resume= makes what is missing, from where it was."""
    base, environment = sweep_in_a_process(tmp_path, {"rowwise": "wait"})
    process, place = started(base, environment, tmp_path, "rowwise", 1)
    process.kill()
    process.wait()
    folder = place.parents[2]
    again = subprocess.run(
        [*base, f"resume={folder.name}"], env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert curves(store.read(folder)) == WHOLE
    assert not (folder / "_checkpoints").exists()
