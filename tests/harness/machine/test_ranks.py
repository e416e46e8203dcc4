"""Ranks and their faults. Oracle: which rank the test makes do what, the store's rows, and the processes that are left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
import torch.distributed as dist
from on_ranks import run
from torch.distributed.fsdp import fully_shard

from harness import store
from harness.engine import arm_process, calls
from harness.engine.arm_process import Conditions
from harness.engine.arms import Process, TimeLimits
from harness.engine.far import CALLS, Follower
from harness.engine.plan import PlannedCase
from harness.machine import torchrun
from harness.machine.processes import END_S
from harness.machine.ranks import gpus_missing, late
from harness.store.case import Case
from harness.store.errors import Cause, RemoteError
from harness.suites import parallel

HERE = Path(__file__)


def total(start: float) -> tuple[float, int]:
    mine = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(mine)
    return mine.item(), dist.get_rank()


@pytest.mark.parametrize("world", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_results_come_by_rank_from_one_group(world: int) -> None:
    expected = world * 10.0 + sum(range(world))
    assert run(total, world, 10.0) == [(expected, rank) for rank in range(world)]


def about_a_rank() -> tuple[str | None, int, int]:
    os.write(2, f"words of {dist.get_rank()}\n".encode())
    return os.environ.get("RANKS_TEST"), torch.get_num_threads(), os.getpgid(0) - os.getpid()


def test_a_rank_has_the_environment_of_now_one_thread_a_process_group_and_the_callers_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(total, 1, 0.0)  # the server that forks ranks has started
    monkeypatch.setenv("RANKS_TEST", "now")
    assert run(about_a_rank, 2) == [("now", 1, 0)] * 2
    assert {"rank 0: words of 0", "rank 1: words of 1"} <= set(capfd.readouterr().err.splitlines())


def at_fault(how: str, note: str) -> None:
    """Rank 1 does what `how` says; the others wait for it in an all-reduce."""
    rank = dist.get_rank()
    if rank == 1:
        child = subprocess.Popen(["sleep", "600"])
        Path(note).write_text(str(child.pid))
        if how == "raise":
            raise ValueError("told so")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "sleep":
            time.sleep(600)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "leave":
            return
        if how == "another collective":
            dist.broadcast(torch.ones(3), 0)
    dist.all_reduce(torch.ones(3))


def of_this_file(process: psutil.Process) -> bool:
    try:
        return "test_ranks" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def soon(condition: Any) -> bool:
    """Whether it becomes true: a killed process needs a moment to be gone."""
    return any(condition() or time.sleep(0.02) for _ in range(3000))


ENDS = {  # how -> the cause, and what the message says of rank 1
    "raise": (Cause.RUN, "rank 1 of 3: ValueError: told so"),
    "kill": (Cause.DIED, "rank 1 of 3: its process died .signal 9, SIGKILL"),
    "exit": (Cause.DIED, "rank 1 of 3: its process died .exit code 7"),
    "sleep": (
        Cause.TIMEOUT,
        "rank 1 of 3 is at fault: .*rank 1 is in no collective, at .*test_ranks.py.*for 2 s",
    ),
    "stop": (Cause.TIMEOUT, "rank 1 of 3 is at fault: .*rank 1 is in no collective, gives no sign of life"),
    "leave": (
        Cause.TIMEOUT,
        "rank 1 of 3 is at fault: rank 0 waits in all_reduce at .* in at_fault.*rank 1 has returned",
    ),
    "another collective": (Cause.TIMEOUT, "rank 1 of 3 is at fault: .*rank 1 waits in broadcast"),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_rank_at_fault_is_named_and_nothing_is_left(how: str, tmp_path: Path) -> None:
    note, (cause, words) = tmp_path / "pid", ENDS[how]
    with pytest.raises(RemoteError, match=f"(?s)^{words}") as caught:
        run(at_fault, 3, how, str(note), timeout_s=2.0)
    assert caught.value.cause is cause
    assert soon(lambda: gone(int(note.read_text())))  # what the rank had started
    assert not [p for p in psutil.Process().children(recursive=True) if not gone(p.pid) and of_this_file(p)]


def stack(*frames: str) -> str:
    lines = (f'  File "{place.split(":")[0]}", line 7 in {place.split(":")[1]}' for place in frames)
    return "\n".join(["Current thread 0x0 (most recent call first):", *lines])


LIB = "/venv/lib/python3.11/site-packages/torch/distributed"
WAITS = stack(f"{LIB}/distributed_c10d.py:all_reduce", f"{LIB}/c10d_logger.py:wrapper", "/my/train.py:step")
ELSEWHERE = stack(f"{LIB}/distributed_c10d.py:broadcast", "/my/train.py:other")
SLEEPS = stack("/my/train.py:sleep", "/my/train.py:step")


@pytest.mark.parametrize(
    ("stacks", "ended", "guilty"),
    [
        ({0: WAITS, 1: SLEEPS, 2: WAITS}, set(), 1),
        ({0: WAITS, 1: ELSEWHERE, 2: WAITS}, set(), 1),
        ({0: SLEEPS}, set(), 0),
        ({0: WAITS, 1: ELSEWHERE}, set(), None),  # which of two is the odd one?
        ({0: WAITS, 1: WAITS}, set(), None),  # of the same collective: the network's fault
    ],
)
def test_the_odd_one_out_is_at_fault(stacks: dict[int, str], ended: set[int], guilty: int | None) -> None:
    found, words = late(stacks, ended, len(stacks) + len(ended))
    assert found == guilty
    assert (f"rank {guilty} of" in words) == (guilty is not None)
    if 0 in stacks and stacks[0] == WAITS:
        assert "rank 0 waits in all_reduce at /my/train.py:7 in step" in words


def of_another_shape(how: str) -> None:
    mine = torch.ones(4 + (dist.get_rank() == 1))
    if how == "all-gather":
        dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
    else:  # rank 1 has built another layer
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8 * len(mine))
        fully_shard(layer)
        layer(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("how", ["all-gather", "fully_shard"])
def test_shapes_that_differ_between_ranks_are_told_by_torch(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(
        RemoteError, match=r"(?s)Detected mismatch between collectives on ranks.*Rank 1"
    ) as caught:
        run(of_another_shape, 2, how, timeout_s=20.0)
    assert "Rank 0" in str(caught.value)


def test_what_cannot_be_sent_is_refused() -> None:
    process = Process(Conditions.here(), TimeLimits(), lambda lines: None)
    try:
        for fn, *args in [(lambda told: 0,), (arm_process.refuse, 1j), (arm_process.refuse, {1, 2})]:
            with pytest.raises(RemoteError) as caught:
                process.call(fn, *args)
            assert "isolate=false" in str(caught.value)
            assert caught.value.cause is Cause.ERROR
        assert process.call(arm_process.started_threads) == ""
    finally:
        process.close()


def test_more_ranks_than_gpus_are_refused() -> None:
    assert gpus_missing(64, "cpu") is None
    assert gpus_missing(64, "cuda") == f"64 ranks need 64 GPUs; here are {torch.cuda.device_count()}"


def environment(**more: str) -> dict[str, str]:
    places = [*HERE.parents[:2], HERE.parents[2] / "fp8core", HERE.parents[3]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), **more}


def wait_for_ever(note: str) -> None:
    Path(f"{note}-{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(600)


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    note = tmp_path / "rank"
    script = (
        "import sys; from on_ranks import run; import test_ranks as t; run(t.wait_for_ever, 2, sys.argv[1])"
    )
    parent = forked.start(["-c", script, str(note)], env=environment())
    written = [tmp_path / f"rank-{rank}" for rank in range(2)]
    assert soon(lambda: not parent.is_alive() or all(f.exists() and f.read_text() for f in written))
    pids = [int(f.read_text()) for f in written]
    parent.kill()
    parent.join()
    assert soon(lambda: all(map(gone, pids)))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


class Store(dict[str, bytes]):
    """One of torch's, as far as it is used."""

    def add(self, key: str, more: int) -> int:
        self[key] = b"%d" % (int(self.get(key, b"0")) + more)
        return int(self[key])

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value if isinstance(value, bytes) else value.encode()


def test_whoever_writes_into_the_store_has_measured_what_this_command_measures_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Oracle: the calls and cases of this command. All is JSON: no message makes an object or calls what it names."""
    case = Case.of("parallel", {"cell": "ddp", "steps": 1})
    planned = PlannedCase("parallel", parallel, case, ("no_fp8",))
    follower, store = Follower(1, {case.case_id: planned}, tmp_path), Store()

    def called(call: list[str], *args: object) -> tuple[Any, list[Any]]:
        return calls.called(follower._allowed({"call": call, "args": args}))

    trial = [arm_process.__name__, "trial"]
    of_another = {"case": case.case_id, "suite": "os", "point": ["os", {}, 1]}
    fn, (found, *args) = called(trial, of_another, "no_fp8", "cpu", {"folder": f"{tmp_path}/r/a"})
    assert fn is arm_process.trial
    assert (found.suite, found.case) == (parallel, case)
    assert args == ["no_fp8", "cpu", tmp_path / "r/a"]
    assert set(CALLS) >= {"prepare", "sample", "finish", "trial"}
    for wrong in (
        ([arm_process.__name__, "refuse"], "x"),
        ([arm_process.__name__, "os"], "x"),
        (["os", "system"], "true"),
        (["os", "call"], "true"),
        (["call"], "true"),
        (trial, {"case": "of another plan", "suite": "os"}),
        (trial, {}),
        (trial, {"folder": "/etc"}),
        (trial, {"folder": f"{tmp_path}/../x"}),
    ):
        with pytest.raises(LookupError):
            called(*wrong)
    torchrun.send(store, 1, do="leave", number=0)
    assert json.loads(store["to/1/1"]) == {"do": "leave", "number": 0}


@pytest.mark.slow
def test_a_fault_of_one_of_torchruns_ranks_ends_its_arm_alone(tmp_path: Path) -> None:
    """Torchrun's own two ranks. Oracle: the planted fault, in the FP8 steps of rank 1."""
    words = [
        "sweep=train", "axes.ranks=2", "device=cpu", "axes.compute=fp32", "axes.batch=16", "axes.seq=16", "run_id=r",
        'model._target_=model_on_ranks.build', "model.batch=model_on_ranks.batch", "arms=[bf16_eager,tensorwise_eager]",
        "quiet=true", "report=false", "rounds=3",
    ]  # fmt: skip
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", "-m", "harness", *words],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment(RANK_1="killed"),
    )  # fmt: skip
    frame = store.read(tmp_path / "results/train/r")
    assert done.returncode == 1, done.stderr
    (failed,) = frame[frame["status"] == "failed"].to_dict("records")
    assert (failed["arm"], failed["cause"]) == ("tensorwise_eager", "died")
    assert "rank 1 of 2 (host 1 of 1): its process died (signal 9, SIGKILL)" in failed["reason"]
    times = frame[(frame["arm"] == "bf16_eager") & (frame["metric"] == "time_ms")]
    assert set(times["status"]) == {"ok"}


@pytest.mark.slow
def test_a_job_that_is_cancelled_waits_for_no_rank_before_it_has_said_so(tmp_path: Path) -> None:
    """Torchrun and Slurm send all ranks SIGTERM, so that none but rank 0 answers any more, and kill rank 0 30 s later."""
    words = [
        "sweep=parallel",
        "axes.cell=hsdp",
        "axes.steps=100000",
        "arms=[no_fp8]",
        "device=cpu",
        "run_id=r",
    ]
    command = [*TORCHRUN, "--nproc-per-node=4", "-m", "harness", *words, "report=false"]
    with (tmp_path / "said").open("w+") as said:
        job = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said, env=environment())
        under_way = tmp_path / "results/parallel/r/_progress.json"
        assert soon(lambda: job.poll() is not None or (under_way.exists() and computing(job.pid) >= 4))
        pids = [p.pid for p in psutil.Process(job.pid).children(recursive=True)]
        began = time.monotonic()
        job.send_signal(signal.SIGTERM)
        job.wait(60)
        said.seek(0)
        lines = said.read()
    assert json.loads((tmp_path / "results/parallel/r/_run.json").read_text())["state"] == "interrupted", (
        lines
    )
    assert time.monotonic() - began < 2 * END_S
    assert (
        "terminate called" not in lines
    )  # by torch's store, where a thread waits in it as the interpreter exits
    assert soon(lambda: all(map(gone, pids)))


def computing(job: int) -> int:
    """Ranks of a job whose processes compute: each is forked from a server, which is a child of torchrun's own process."""
    found = psutil.Process(job).children(recursive=True)
    return sum(
        "multiprocessing.forkserver" in " ".join(p.cmdline()) and p.cpu_times().user > 1 for p in found
    )


@pytest.mark.slow
def test_a_sweep_runs_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    """The command of the docs. Oracle: the suite's own, losses of weights gathered in high precision."""
    words = (
        "sweep=allgather ranks=2 device=cpu axes.compute=fp32 axes.fp8_all_gather=true quiet=true run_id=r1"
    )
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", "-m", "harness", *words.split()],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frame = store.read(tmp_path / "results/allgather/r1")
    assert set(frame.loc[frame["metric"].isin(["time_ms", "loss_deviation"]), "status"]) == {"ok"}
    assert {json.loads(resolved)["hosts"] for resolved in frame["resolved"]} == {1}
