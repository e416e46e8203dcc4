"""A suite whose cases do what ends or confuses a process; importable by workers, as a suite must be."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from toy import ToySuite, nothing

from harness.store.errors import SpoiledError
from harness.timing.timers import CpuTimer
from harness.timing.workload import ArmInfo, Numerics, Workload

if TYPE_CHECKING:
    from harness.store.case import Case

kept: list[bytes] = []
fault: list[str] = []  # of this process's device
FOUR = {
    "base": ArmInfo("the baseline"),
    "other": ArmInfo("a candidate", baseline="base"),
    "peer": ArmInfo("another", baseline="base"),
    "far": ArmInfo("compared with a candidate", baseline="other"),
}


def segfault(case: Case) -> None:
    ctypes.string_at(0)


def exits(case: Case) -> None:
    print("last words", file=sys.stderr)
    sys.exit(3)


def mutter(case: Case, who: str = "worker") -> None:
    """What libraries write by themselves: a warning of Python, one of torch's loggers, a line of a C++ library."""
    warnings.warn(f"planted warning in the {who}", UserWarning, stacklevel=1)
    logging.getLogger("torch.of_this_test").warning("planted torch log in the %s", who)
    os.write(2, f"planted line in the {who}\n".encode())


def hang(case: Case) -> None:
    Path("hanging").touch()
    time.sleep(600)


def hog(case: Case) -> None:
    """Asks for memory piece by piece, and touches it, until there is no more."""
    pieces = []
    while True:
        pieces.append(bytearray(2**26))


def babble(case: Case) -> None:
    """More than a pipe holds, on both streams, none of it text that a terminal should see."""
    for descriptor in (1, 2):
        os.write(descriptor, b"\x80\x04\x95\xff\x1b[2J\n" * 20_000)
    print("\x1b[31mred", flush=True)


def flood(case: Case) -> None:
    for _ in range(100):
        os.write(1, b"x" * 2**20)


def leave(case: Case) -> None:
    os._exit(0)


def raise_base(case: Case) -> None:
    raise BaseException("of nobody")


def kill_group(case: Case) -> None:
    os.killpg(0, signal.SIGKILL)


def lose_folder(case: Case) -> None:
    folder = Path(tempfile.mkdtemp(dir="."))
    os.chdir(folder)
    Path("../" + folder.name).rmdir()


def clear_path(case: Case) -> None:
    sys.path.clear()


def spin(case: Case) -> None:
    while True:
        pass


def burden(case: Case) -> None:
    """Busy children that nobody waits for."""
    for _ in range(2):
        if (child := os.fork()) == 0:
            spin(case)
        Path(f"burden-{child}").write_text(str(child))


def witness(case: Case) -> None:
    """Writes how many of a neighbour's busy children live."""
    pids = [int(path.read_text()) for path in Path().glob("burden-*")]
    Path("witness").write_text(str(sum(map(psutil.pid_exists, pids))))


def pause(case: Case, calls: list[int] = []) -> None:  # noqa: B006 - counts the calls of this process
    """Stopped in its second call, the first of a round, and continued after 300 ms."""
    calls.append(1)
    if len(calls) == 2:
        subprocess.Popen(["sh", "-c", "sleep 0.3; kill -CONT $PPID"]).returncode = 0
        os.kill(os.getpid(), signal.SIGSTOP)


def close_everything(case: Case) -> None:
    os.closerange(3, 1000)
    time.sleep(0.2)  # the parent has seen by now that it is gone
    os.write(2, b"last words\n")


def leak(case: Case) -> None:
    kept.append(b"x" * 2**27)


def die_once(case: Case) -> None:
    been = Path(f"been-{case.case_id}")
    if not been.exists():
        been.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def detach_bare(case: Case) -> None:
    """Likewise, with nothing in its environment."""
    detach(case, env={})


def detach(case: Case, env: dict[str, str] | None = None) -> None:
    """Starts a process that no signal to this one's group reaches, as a library's server."""
    process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env=env)
    process.returncode = 0  # nobody waits for it
    Path(f"detached-{process.pid}").write_text(str(process.pid))


def die_detached(case: Case) -> None:
    detach(case)
    die(case)


def forks(case: Case) -> None:
    """A child without a new program, in a session of its own: neither its parent nor its environment says whose it is."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            Path(f"forked-{os.getpid()}").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)


def spoil(case: Case) -> None:
    """The device answers, and yet this process is to be used no more."""
    raise SpoiledError("a recording was refused")


def lose(case: Case) -> None:
    """A CUDA fault: nothing that this process asks of its device later is done."""

    def synchronize(self: CpuTimer) -> None:
        raise RuntimeError(fault[0])

    fault.append("CUDA error: an illegal memory access was encountered")
    CpuTimer.synchronize = synchronize
    raise RuntimeError(fault[0])


class Unreadable:
    """Pickles; where it is made anew, it leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("called",)


class Unsendable:
    """Has no form at all."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("no pickle")

    def __str__(self) -> str:
        raise KeyError("no text")


def unreadable(case: Case) -> dict[str, Any]:
    return {"resolved": {"it": Unreadable()}}


def unsendable(case: Case) -> dict[str, Any]:
    return {"resolved": {"it": Unsendable(), Unsendable(): 1}}


def tensor(case: Case) -> dict[str, Any]:
    return {"resolved": {"it": torch.ones(2)}}


def words(case: Case) -> dict[str, Any]:
    return {"bytes_moved": "many"}


def undecodable(case: Case) -> None:
    raise RuntimeError("a bad \udcff byte")


def nan(case: Case) -> dict[str, Any]:
    return {"check": lambda: Numerics({"sqnr_db": float("nan")})}


ACTS: Mapping[str, Callable[[Case], dict[str, Any] | None]] = {
    act.__name__: act
    for act in (
        segfault, exits, hang, hog, babble, close_everything, detach, detach_bare, die_detached, leak, die_once, die, lose, spoil, unreadable, unsendable, tensor,
        words, undecodable, nan, mutter, forks, flood, leave, raise_base, kill_group, lose_folder, clear_path, spin, burden,
        witness, pause,
    )
}  # fmt: skip


@dataclass
class Unruly(ToySuite):
    """Arm `other` of case n does `acts[n]` while it is built, or the arms do `acts[n][arm]`; "timed ..." when they are timed."""

    acts: Mapping[int, str | Mapping[str, str]] = field(default_factory=dict)

    def build(self, case: Case, arm: str, device: str) -> Workload:
        if fault:
            raise RuntimeError(fault[0])
        acts = self.acts.get(case.integer("n"), {})
        act = ({"other": acts} if isinstance(acts, str) else acts).get(arm)
        given: dict[str, Any] = {"run": nothing, "check": lambda: Numerics({"sqnr_db": 28.5})}
        if act is not None and act.startswith("timed "):
            given["run"] = partial(ACTS[act.removeprefix("timed ")], case)
        elif act is not None:
            given |= ACTS[act](case) or {}
        resolved = {"process": os.getpid(), **given.pop("resolved", {})}
        return Workload(**given, resolved=resolved)


class Muttering(Unruly):
    """The command's own process mutters while the sweep is planned."""

    def unsupported(self, case: Case, arm: str, device: str) -> None:
        if multiprocessing.parent_process() is None:
            mutter(case, "parent")


class Alone(Unruly):
    """Whole steps."""

    ALONE = True
