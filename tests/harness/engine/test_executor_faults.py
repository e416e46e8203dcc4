"""Sweeps that survive. Oracle: every planned (case, arm) ends in exactly one row a metric, whatever its process did."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil
import pytest
import torch
from toy import ToySuite, as_module, planned
from unruly import FOUR, Alone, Unruly, fault, kept

from harness import store
from harness.__main__ import main
from harness.engine import arms, bench
from harness.engine.arm_process import Conditions
from harness.engine.arms import TimeLimits
from harness.engine.bench import Setting
from harness.engine.executor import Place, RunOutcome, run
from harness.engine.resume import stored_cases
from harness.engine.rows import row
from harness.engine.stages import Stage
from harness.store.errors import Cause
from harness.timing.rounds import TimingConfig, measure
from harness.timing.timers import CpuTimer
from harness.timing.workload import ArmInfo

if TYPE_CHECKING:
    from harness.engine.plan import SweepPlan, Task

QUICK = TimingConfig(
    min_rounds=2, max_rounds=2, min_samples=1, min_seconds=0.0, block_ms=0.1,
    warmup_min_iterations=1, warmup_min_seconds=0.0, warmup_max_seconds=0.1,
)  # fmt: skip
MIB = 2**20


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(suite: ToySuite, count: int) -> SweepPlan:
    return planned(as_module(suite), {"n": list(range(1, count + 1))})


def sweep(
    suite: ToySuite, count: int, folder: Path = Path("run"), done: set[str] | None = None, **changes: Any
) -> tuple[RunOutcome, pd.DataFrame]:
    given = {"places": [Place(Conditions.here(memory_bytes=384 * MIB))]} | changes
    writer = store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})
    setting = Setting("cpu", QUICK, control=False)
    limits = TimeLimits(**{name: given.pop(name) for name in ("silence_s", "wall_s") if name in given})
    outcome = run(plan(suite, count), writer, setting, limits=limits, done=done or (), **given)
    writer.close(outcome.state)
    return outcome, store.read(folder)


def of_case(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    return frame[frame["axes"] == f'{{"n":{n}}}']


def whole(frame: pd.DataFrame, count: int) -> None:
    """Every case and arm has one row of its time, and at most one of any metric."""
    assert not frame.duplicated(["case_id", "arm", "metric"]).any()
    times = frame[frame["metric"] == "time_ms"]
    assert times.groupby("arm").size().to_dict() == {"base": count, "other": count}


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


CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("act", ["lose", "timed lose"])
def test_without_other_processes_a_lost_device_is_laid_at_its_arm_and_resume_runs_the_case(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuTimer, "synchronize", CpuTimer.synchronize)  # is put back, as `fault` is
    suite = Unruly(ARMS=FOUR, acts={2: {"other": act}})
    try:
        _, frame = sweep(suite, 3, places=())
    finally:
        fault.clear()
    assert (of_case(frame, 1)["status"] == "ok").all()
    times = frame[frame["metric"] == "time_ms"]
    rows = of_case(times, 2).set_index("arm")["reason"].to_dict()
    assert rows.pop("other") == CUDA
    why = f"the device was lost in this case: {CUDA}; resume=RUN_ID runs it again"
    assert {arm for arm, reason in rows.items() if reason == why} == {"base", "peer", "far"}
    assert of_case(times, 3)["reason"].str.startswith("the device was lost in case ").all()
    assert len(stored_cases(Path("run"), plan(suite, 3))) == 1


def test_a_case_that_takes_too_long_as_a_whole_fails_as_a_whole() -> None:
    _, frame = sweep(Unruly(acts={1: "hang"}), 2, wall_s=5.0)
    rows = of_case(frame, 1)
    assert rows["reason"].tolist() == [
        "not done within 5 s after it was begun in arm other; case_wall_s=SECONDS allows more"
    ] * len(rows)
    assert rows["arm"].tolist() == ["base", "other"]
    after = of_case(frame, 2)
    assert (set(after["status"]), set(after["tries"])) == ({"ok"}, {1})


@pytest.mark.slow
def test_a_case_that_is_late_while_it_is_timed_is_no_fault_of_its_arms() -> None:
    _, frame = sweep(Unruly(acts={1: {"other": "timed hang"}}), 1, wall_s=5.0)
    why = "not done within 5 s after timing began in arm other; case_wall_s=SECONDS allows more"
    rows = frame.set_index("arm")[["status", "cause", "reason"]]
    assert rows.T.to_dict("list") == {arm: ["failed", "timeout", why] for arm in ("base", "other")}


def test_a_fault_outside_of_the_arms_fails_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = iter([False, True, False])

    def timed(*given: Any, **named: Any) -> Any:
        if next(broken):
            raise ZeroDivisionError("planted")
        return measure(*given, **named)

    monkeypatch.setattr(bench, "measure", timed)
    outcome, frame = sweep(Unruly(), 3)
    assert outcome.state == "finished"
    whole(frame, 3)
    assert set(of_case(frame, 2)["reason"]) == {"ZeroDivisionError: planted"}
    assert set(of_case(frame, 2)["status"]) == {"failed"}
    assert set(frame[frame["axes"] != '{"n":2}']["status"]) == {"ok"}


@pytest.mark.usefixtures("signals_are_heard")
def test_an_interrupt_of_several_lanes_waits_for_none_of_them() -> None:
    """They hang in processes; what an interrupt has killed is not begun anew."""
    begun = itertools.count(1)  # of two threads, each of which gets a number of its own

    def interrupt(task: Task | None, what: object) -> None:
        if isinstance(what, Stage) and next(begun) == 4:  # each of two cases has built its baseline
            os.kill(os.getpid(), signal.SIGINT)

    places = [Place(Conditions.here(), f"e-{name}", {}) for name in "ab"]
    started = time.monotonic()
    outcome, _ = sweep(
        Unruly(acts={1: "hang", 2: "hang"}), 2, places=places, notify=interrupt, silence_s=60.0
    )
    assert outcome.state == "interrupted"
    assert time.monotonic() - started < 45.0


def test_what_an_arm_of_this_process_answers_is_data() -> None:
    """Oracle: an object whose making anew would leave a file does not. With processes: `test_survival`."""
    acts = dict(enumerate(("unreadable", "unsendable", "tensor", "words", "undecodable"), 1))
    outcome, frame = sweep(Unruly(acts=acts), len(acts), places=())
    assert all(reason.isascii() for _, reason in outcome.reasons)
    whole(frame, len(acts))
    assert frame[frame["status"] == "failed"]["axes"].tolist() == ['{"n":4}', '{"n":5}']
    assert not Path("called").exists()


def test_no_suite_starts_a_thread_in_the_server_that_processes_are_forked_from() -> None:
    """Oracle: the kernel's list of threads of a process that imports what the server does. pandas and pyarrow start one."""
    code = (
        "import importlib, os; from harness.engine import arms; from harness.suites import NAMES\n"
        "for name in [*arms.PRELOADED, *(f'harness.suites.{n}' for n in NAMES), arms.COMPILER]:\n"
        "    importlib.import_module(name)\n"
        "    assert len(os.listdir('/proc/self/task')) == 1, name"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_disk_that_is_full_ends_the_run_with_the_earlier_rows_intact() -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write half way, as a full one does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_case(task: Task | None, what: object) -> None:
        if task is not None and task.case["n"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    try:
        with pytest.warns(RuntimeWarning, match="closed without compacting"):
            outcome, frame = sweep(Unruly(), 4, notify=on_case)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.state == "failed"
    assert "File too large; the earlier rows are intact" in outcome.message
    assert frame["case_id"].nunique() == 2
    assert not list(Path("run").glob("*.tmp"))


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_is_used_again_takes_over_conditions_and_is_replaced_when_it_leaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(arms, "LEAK_BYTES", 96 * MIB)
    given = Conditions.here(variables={"OF_THIS_TEST": "1"})
    with arms.ArmPool(given, TimeLimits(), "cpu") as arm_pool:
        pids = []
        for size in (0, 64, 64, 0):
            arm_pool.begin(["a", "b"])
            assert arm_pool.of("a").call(grown, size * MIB) == ["1", str(tmp_path), torch.get_num_threads()]
            pids.append(arm_pool.of("a").pids[0])
            arm_pool.end([])
        assert pids[0] == pids[1] == pids[2] != pids[3]
        case = plan(ToySuite(ARMS={"a": ArmInfo("it fails")}), 1).cases[0]
        arm_pool.end([row(case, "a", "failed", reason="planted", cause=Cause.RUN)])
        arm_pool.begin(["a"])
        assert arm_pool.of("a").pids[0] != pids[3]
    assert not [pid for pid in pids if alive(pid)]


def grown(tell: object, size: int) -> list[object]:
    kept.append(b"x" * size)
    return [os.environ["OF_THIS_TEST"], Path.cwd(), torch.get_num_threads()]
