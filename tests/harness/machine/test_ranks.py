"""Ranks and their faults. Oracle: which rank the test makes do what, the store's rows, and the processes that are left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from harness import store
from harness.machine import ranks
from harness.machine.processes import END_S
from harness.machine.rank_process import late
from harness.machine.ranks import RanksError
from harness.store.errors import RETRYABLE, Cause, cause_of

HERE = Path(__file__)


def total(start: float) -> tuple[float, int]:
    mine = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(mine)
    return mine.item(), dist.get_rank()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_results_come_by_rank_from_one_group(world: int) -> None:
    expected = world * 10.0 + sum(range(world))
    assert ranks.run(total, world, 10.0) == [(expected, rank) for rank in range(world)]


def about_a_rank() -> tuple[str | None, int, int]:
    os.write(2, f"words of {dist.get_rank()}\n".encode())
    return os.environ.get("RANKS_TEST"), torch.get_num_threads(), os.getpgid(0) - os.getpid()


def test_a_rank_has_the_environment_of_now_one_thread_a_process_group_and_the_callers_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.run(total, 1, 0.0)  # the server that forks ranks has started
    monkeypatch.setenv("RANKS_TEST", "now")
    assert ranks.run(about_a_rank, 2) == [("now", 1, 0)] * 2
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


ENDS = {  # how -> what the message says of rank 1
    "raise": "rank 1 of 3: .*ValueError: told so",
    "kill": "rank 1 of 3: was killed by SIGKILL",
    "exit": "rank 1 of 3: exited with code 7",
    "sleep": "rank 1 of 3 is at fault: not all ended within 2 s: .*rank 1 is in no collective, at .*test_ranks.py",
    "stop": "rank 1 of 3 is at fault: .*rank 1 is in no collective, gives no sign of life",
    "leave": "rank 1 of 3 is at fault: .*rank 0 waits in all_reduce at .* in at_fault.*rank 1 has returned",
    "another collective": "rank 1 of 3 is at fault: .*rank 1 waits in broadcast",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_rank_at_fault_is_named_and_nothing_is_left(how: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(RanksError, match=f"(?s){ENDS[how]}") as caught:
        ranks.run(at_fault, 3, how, str(note), timeout_s=2.0)
    assert caught.value.rank == 1
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
    found = late(stacks, ended, len(stacks) + len(ended), 5.0)
    assert found.rank == guilty
    assert (f"rank {guilty} of" in str(found)) == (guilty is not None)
    assert "within 5 s" in str(found)
    if 0 in stacks and stacks[0] == WAITS:
        assert "rank 0 waits in all_reduce at /my/train.py:7 in step" in str(found)


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
        RanksError, match=r"(?s)Detected mismatch between collectives on ranks.*Rank 1"
    ) as caught:
        ranks.run(of_another_shape, 2, how, timeout_s=20.0)
    assert "Rank 0" in str(caught.value)


def trace() -> None:
    Path("called").mkdir()


class Called:
    """Pickles; where it is made anew, it leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return trace, ()


def answered(what: str) -> Any:
    found = {"unpicklable": lambda: 0, "object": Called(), "data": (Cause.OOM, torch.ones(2))}
    return found[what] if dist.get_rank() == 1 else None


@pytest.mark.parametrize("what", ["unpicklable", "object"])
def test_what_is_no_data_is_refused_and_called_by_nobody(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RanksError) as caught:
        ranks.run(answered, 2, what)
    assert caught.value.rank == 1
    assert not Path("called").exists()


def test_data_comes_as_it_was_sent() -> None:
    nothing, (cause, ones) = ranks.run(answered, 2, "data")
    assert (nothing, cause, ones.tolist()) == (None, Cause.OOM, [1.0, 1.0])


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"lambda|pickle"):
        ranks.run(lambda: 0, 2)


@pytest.mark.parametrize(
    ("world", "device", "message"), [(0, "cpu", "at least one"), (64, "cuda", "64 GPUs; here")]
)
def test_bad_worlds_are_refused(world: int, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranks.run(total, world, 0.0, device=device)


def wait_for_ever(note: str) -> None:
    Path(f"{note}-{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(600)


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    note = tmp_path / "rank"
    script = "import sys; from harness.machine import ranks; import test_ranks as t; ranks.run(t.wait_for_ever, 2, sys.argv[1])"
    path = os.pathsep.join([os.pathsep.join(map(str, HERE.parents[:2])), str(HERE.parents[3])])
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(note)], env={**os.environ, "PYTHONPATH": path}
    )
    written = [tmp_path / f"rank-{rank}" for rank in range(2)]
    assert soon(lambda: parent.poll() is not None or all(f.exists() and f.read_text() for f in written))
    pids = [int(f.read_text()) for f in written]
    parent.kill()
    parent.wait()
    assert soon(lambda: all(map(gone, pids)))


def torchrun(words: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([os.pathsep.join(map(str, HERE.parents[:2])), str(HERE.parents[3])])
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


SHARED = """
import sys
import test_ranks as t
from harness.machine import ranks, torchrun
def command():
    print("here", ranks.run(t.total, 2, 1.0), ranks.run(t.total, 3, 1.0), flush=True)
    for how in sys.argv[1:]:
        try:
            ranks.run(t.fails_under_torchrun, 2, how)
        except ranks.RanksError as error:
            print("caught", error.rank, str(error).splitlines()[-1], flush=True)
    return 0
if __name__ == "__main__":
    sys.exit(torchrun.shared(command))
"""


def fails_under_torchrun(how: str) -> None:
    if how == "all":
        raise ValueError("refused everywhere")
    if dist.get_rank() == 1:
        raise ValueError("refused by one")


def test_torchruns_ranks_are_taken_and_rank_0_speaks(tmp_path: Path) -> None:
    """Both worlds at once: torchrun's own two ranks, and three that the harness starts beside them. A fault ends no more
    than its own call."""
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = torchrun([*start, str(script), "one", "all"], tmp_path)
    said = done.stdout.splitlines()
    assert said[0] == "here [(3.0, 0), (3.0, 1)] [(6.0, 0), (6.0, 1), (6.0, 2)]"
    assert said[1] == "caught 1 ValueError: refused by one"
    assert said[2].endswith("ValueError: refused everywhere")
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import sys, time
import test_ranks as t
from harness.machine import ranks, torchrun
from harness.machine.processes import END_S, ENDING, interruptible
def command():
    with interruptible():
        gangs = [ranks.Gang(4), ranks.Gang(4)]
        try:
            gangs[0].run(t.wait_for_ever, sys.argv[1])
        except KeyboardInterrupt:
            for gang in gangs:
                gang.close()
            print("waited", END_S - ENDING.left(), flush=True)
            return 2
if __name__ == "__main__":
    sys.exit(torchrun.shared(command))
"""


def test_a_job_that_is_cancelled_waits_for_no_rank_before_it_has_said_so(tmp_path: Path) -> None:
    """Torchrun and Slurm send all ranks SIGTERM, so that none but rank 0 answers any more, and kill rank 0 30 s later."""
    script, note = tmp_path / "interrupted.py", tmp_path / "rank"
    script.write_text(INTERRUPTED)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script), str(note)]
    path = os.pathsep.join([os.pathsep.join(map(str, HERE.parents[:2])), str(HERE.parents[3])])
    env = {**os.environ, "PYTHONPATH": path}
    with (tmp_path / "said").open("w+") as said:
        job = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=said, stderr=said, env=env)
        written = [tmp_path / f"rank-{rank}" for rank in range(4)]
        assert soon(lambda: job.poll() is not None or all(f.exists() and f.read_text() for f in written))
        pids = [int(f.read_text()) for f in written]
        job.send_signal(signal.SIGTERM)
        job.wait(60)
        said.seek(0)
        lines = said.read()
    waited = re.search(r"^waited (.*)", lines, re.MULTILINE)
    assert waited is not None, lines
    assert float(waited[1]) < END_S / 3  # no part of the time that a command has for all that it waits for
    assert (
        "terminate called" not in lines
    )  # by torch's store, where a thread waits in it as the interpreter exits
    assert soon(lambda: all(map(gone, pids)))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (RanksError("gone", 1, lost=True), Cause.DIED),  # its row waits, and its checkpoints stay
        (RanksError("full", 1, words="out of memory: 2 GiB"), Cause.OOM),
        (RanksError("wrong", 1), Cause.RUN),
    ],
)
def test_a_lost_rank_may_come_back_and_a_fault_of_the_arm_is_its_result(
    fault: RanksError, cause: Cause
) -> None:
    """Oracle: which causes `resume=` takes up again."""
    assert cause_of(fault, Cause.RUN) == cause
    assert (cause in RETRYABLE) == fault.lost


@pytest.mark.slow
def test_a_sweep_runs_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    """The command of the docs. Oracle: the suite's own, losses of weights gathered in high precision."""
    words = (
        "sweep=allgather ranks=2 device=cpu axes.compute=fp32 axes.fp8_all_gather=true quiet=true run_id=r1"
    )
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harness"]
    done = torchrun([*start, *words.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    frame = store.read(tmp_path / "results/allgather/r1")
    assert set(frame.loc[frame["metric"].isin(["time_ms", "loss_deviation"]), "status"]) == {"ok"}
    assert {json.loads(resolved)["hosts"] for resolved in frame["resolved"]} == {1}
