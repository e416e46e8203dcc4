"""Sweeps that survive. Oracle: every planned (case, arm) ends in exactly one row a metric, whatever its process did."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from toy import ToySuite
from unruly import Alone, Unruly

from harness import store
from harness.__main__ import main
from harness.engine.executor import Executor, Outcome, Place
from harness.engine.plan import Plan, PlannedCase, make_plan
from harness.engine.resume import stored_cases
from harness.engine.workers import Conditions
from harness.timing.rounds import TimingConfig
from harness.timing.workload import Unsupported

QUICK = TimingConfig(
    min_rounds=2, max_rounds=2, min_samples=1, min_seconds=0.0, block_ms=0.1,
    warmup_min_iterations=1, warmup_min_seconds=0.0, warmup_max_seconds=0.1,
)  # fmt: skip
MIB = 2**20


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(suite: ToySuite, count: int) -> Plan:
    config: dict[str, Any] = {
        "name": "toy", "suite": "toy", "axes": {"n": list(range(1, count + 1))}, "shapes": [], "arms": [], "parts": {},
        "model": None, "seed": 0, "device": "cpu",
    }  # fmt: skip
    return make_plan(config, {"toy": suite})


def sweep(
    suite: ToySuite, count: int, folder: Path = Path("run"), done: set[str] | None = None, **changes: Any
) -> tuple[Outcome, pd.DataFrame]:
    given = {"places": [Place(Conditions.here(memory_bytes=384 * MIB))], "control": False} | changes
    writer = store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})
    outcome = Executor(device="cpu", timing=QUICK, **given).run(plan(suite, count), writer, done or ())
    writer.close(outcome.state)
    return outcome, store.read(folder)


def of_case(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    return frame[frame["axes"] == f'{{"n":{n}}}']


def whole(frame: pd.DataFrame, count: int) -> None:
    """Every case and arm has one row of its time, and at most one of any metric."""
    assert not frame.duplicated(["case_id", "arm", "metric"]).any()
    times = frame[frame["metric"] == "time_ms"]
    assert times.groupby("arm").size().to_dict() == {"base": count, "other": count}


def processes(frame: pd.DataFrame, n: int) -> set[int]:
    resolved = [json.loads(text) for text in of_case(frame, n)["resolved"]]
    return {r["process"] for r in resolved if "process" in r}


ENDINGS = {
    "segfault": "its process died twice (signal 11, SIGSEGV) in arm other after it was begun: ",
    "exits": "its process died twice (exit code 3) in arm other after it was begun: last words; resume=",
    "close_everything": "its process died twice (exit code 1) in arm other after it was begun: ",
    "die": "its process died twice (signal 9, SIGKILL) in arm other after it was begun; resume=",
    "hog": "out of memory: MemoryError",
    "leak": "",
    "babble": "",
    "die_once": "",
}
TRIES = {"segfault": 3, "exits": 3, "close_everything": 3, "die": 3, "die_once": 2}


def test_whatever_a_case_does_the_others_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    """Bad cases at 2, 4, 6, ...; good ones between."""
    acts = {2 * i + 2: act for i, act in enumerate(ENDINGS)}
    count = 2 * len(acts) + 1
    outcome, frame = sweep(Unruly(acts=acts), count)
    assert outcome.state == "finished"
    whole(frame, count)
    times = frame[frame["metric"] == "time_ms"]
    for n, act in acts.items():
        row = of_case(times, n).set_index("arm").loc["other"]
        assert row["status"] == ("failed" if ENDINGS[act] else "ok"), (act, row["reason"])
        assert row["reason"].startswith(ENDINGS[act]), act
        assert of_case(times, n).set_index("arm").loc["base", "status"] == "ok", act
        assert set(of_case(frame, n)["tries"]) == {TRIES.get(act, 1)}, act
    for n in range(1, count + 1, 2):
        assert (of_case(times, n)["status"] == "ok").all()
    crashed = of_case(times, 2).set_index("arm").loc["other"]
    assert "Fatal Python error: Segmentation fault" in crashed["resolved"]
    assert outcome.statuses["failed"] == 5  # each its own arm alone
    assert capfd.readouterr() == ("", "")


def test_an_arm_that_hangs_ends_after_its_time_and_the_others_are_measured() -> None:
    """Apart, since on a busy machine what works may be silent for as long."""
    outcome, frame = sweep(Unruly(acts={2: "hang"}), 3, case_timeout_s=5.0)
    assert outcome.state == "finished"
    whole(frame, 3)
    assert set(of_case(frame, 2)["tries"]) == {2}
    failed = frame[frame["status"] == "failed"]
    assert (failed["axes"].tolist(), failed["arm"].tolist()) == (['{"n":2}'], ["other"])
    reason = "no sign of life for 5 s in arm other since it was begun; case_timeout_s=SECONDS allows more"
    assert failed["reason"].iloc[0].startswith(reason)


def test_a_process_that_ran_out_of_memory_is_replaced_and_a_good_one_kept() -> None:
    _, frame = sweep(Unruly(acts={2: "hog"}), 4)
    assert processes(frame, 1) == processes(frame, 2)
    assert processes(frame, 2) != processes(frame, 3) == processes(frame, 4)


def test_the_end_of_a_process_does_not_fail_arms_that_cannot_run_here() -> None:
    suite = Unruly(acts={1: "die"}, refuses={"base": Unsupported("device", "needs sm_90")})
    _, frame = sweep(suite, 1)
    assert frame.set_index("arm")["status"].to_dict() == {"base": "skipped", "other": "failed"}


def kill_one_worker(wait_s: float, killed: list[int]) -> None:
    """Kills the one worker that there is, or the next."""
    time.sleep(wait_s)
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    for _ in range(500):
        for child in server.children():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    killed.append(child.pid)
                    return
        time.sleep(0.01)


def test_fifty_kills_in_two_hundred_cases_lose_nothing() -> None:
    """SIGKILL from outside, each some random milliseconds after a random case has started."""
    random_ = random.Random(0)
    victims, started, killed = set(random_.sample(range(195), 50)), [0], []
    killers: list[threading.Thread] = []

    def on_case(planned: PlannedCase) -> None:
        if started[0] in victims:
            wait_s = random_.uniform(0, 0.015)
            killers.append(threading.Thread(target=kill_one_worker, args=(wait_s, killed)))
            killers[-1].start()
        started[0] += 1

    outcome, frame = sweep(Unruly(), 200, on_case=on_case)
    for killer in killers:
        killer.join()
    assert len(killed) == 50
    assert outcome.state == "finished"
    whole(frame, 200)
    assert set(frame["status"]) <= {"ok", "failed"}
    failed = frame[frame["status"] == "failed"]
    assert failed["reason"].str.startswith("its process died twice (signal 9, SIGKILL)").all()
    assert (frame["tries"] == 2).any()
    assert len(frame[frame["status"] == "ok"]["case_id"].unique()) > 150
    # What two kills happened to strike is left to resume=.
    done = stored_cases(Path("run"), plan(Unruly(), 200))
    assert len(done) == 200 - failed["case_id"].nunique()
    _, frame = sweep(Unruly(), 200, done=done)
    whole(frame, 200)
    assert (frame["status"] == "ok").all()


def test_ctrl_c_ends_the_workers_and_keeps_the_finished_cases(request: pytest.FixtureRequest) -> None:
    # A shell hands SIGINT down as ignored to what it starts in the background, this test run perhaps
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def on_case(planned: PlannedCase) -> None:
        if planned.case["n"] == 3:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    outcome, frame = sweep(Unruly(acts={3: "hang"}), 4, on_case=on_case)
    assert outcome.state == "interrupted"
    assert frame["case_id"].nunique() == 2
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    assert [child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_folder_that_vanishes_in_the_middle_ends_the_run_and_says_so() -> None:
    def on_case(planned: PlannedCase) -> None:
        if planned.case["n"] == 3:
            shutil.rmtree("run")

    writer = store.RunWriter(Path("run"), run_id="r", sweep="toy", env_id="e", env={}, about={})
    executor = Executor(
        device="cpu", timing=QUICK, places=[Place(Conditions.here())], on_case=on_case, control=False
    )
    outcome = executor.run(plan(Unruly(), 4), writer)
    assert outcome.state == "failed"
    assert "No such file or directory; the folder itself is gone" in outcome.message
    with pytest.warns(RuntimeWarning, match="closed without compacting"):
        writer.close(outcome.state)


def test_a_disk_that_is_full_ends_the_run_with_the_earlier_rows_intact() -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write half way, as a full one does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_case(planned: PlannedCase) -> None:
        if planned.case["n"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    try:
        with pytest.warns(RuntimeWarning, match="closed without compacting"):
            outcome, frame = sweep(Unruly(), 4, on_case=on_case)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.state == "failed"
    assert "File too large; the earlier rows are intact" in outcome.message
    assert frame["case_id"].nunique() == 2
    assert not list(Path("run").glob("*.tmp"))


def test_several_devices_work_side_by_side_and_rows_say_which() -> None:
    """Two places that stand for GPUs: their workers differ in a variable, their rows in the environment."""
    places = [
        Place(Conditions.here(variables={"CUDA_VISIBLE_DEVICES": f"GPU-{name}"}), f"e-{name}", {"gpu": name})
        for name in "ab"
    ]
    _, frame = sweep(Unruly(), 20, places=places)
    whole(frame, 20)
    assert set(frame["env_id"]) == {"e-a", "e-b"}
    pairs = frame[frame["metric"] == "time_ms"].groupby(["case_id"])["env_id"].nunique()
    assert (pairs == 1).all(), "the arms of a case are timed on one device"
    by_device = [
        {json.loads(r)["process"] for r in frame[frame["env_id"] == env]["resolved"]}
        for env in ("e-a", "e-b")
    ]
    assert by_device[0].isdisjoint(by_device[1])


def test_what_shares_the_power_of_a_machine_is_timed_on_one_device() -> None:
    here = Conditions.here()
    places = [Place(here, "e-a", {"gpu": "a"}), Place(here, "e-b", {"gpu": "b"})]
    _, frame = sweep(Alone(), 6, places=places)
    whole(frame, 6)
    assert set(frame["env_id"]) == {"e-a"}


@pytest.mark.alone
@pytest.mark.gpu
def test_a_worker_on_a_gpu_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep that it works for has no context of its own, or is known; nothing else may compute there."""
    assert main(["sweep=gemm", "device=cuda", "shapes=[]", "axes.M=512", "axes.K=512", "axes.N=512"]) == 0
    frame = store.read(capsys.readouterr().out.splitlines()[-2].split()[-1])
    timed = frame[(frame["metric"] == "time_ms") & (frame["status"] == "ok")]
    assert len(timed)
    assert not any(json.loads(text)["contended"] for text in timed["timing"])


# A sweep whose second case never ends, in a process of its own, to be killed.
ENDLESS = """
import sys
from harness.cli import run
from harness.__main__ import main
from unruly import Alone, Unruly
run.SUITES["toy"] = Unruly(acts={2: "hang"} if "resume" not in sys.argv[-1] else {})
sys.exit(main(["sweep=toy", "device=cpu", *sys.argv[1:]]))
"""
SWEEP = """\
# Does the toy pay?
suite: toy
axes: {n: [1, 2, 3]}
timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""


@pytest.mark.slow
def test_a_sweep_that_was_killed_leaves_no_process_and_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toy.yaml").write_text(SWEEP)
    command = [sys.executable, "-c", ENDLESS]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not Path("hanging").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    (folder,) = Path("results/toy").iterdir()
    before = store.read(folder)
    assert before["case_id"].nunique() == 1
    again = subprocess.run(
        [*command, f"resume={folder.name}"], env=environ, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    frame = store.read(folder)
    assert (frame["status"] == "ok").all()
    assert not frame.duplicated(["case_id", "arm", "metric"]).any()
    assert frame["case_id"].nunique() == 3
    kept = frame[frame["case_id"].isin(before["case_id"])]
    pd.testing.assert_frame_equal(kept.reset_index(drop=True), before)
