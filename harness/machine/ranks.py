"""Ranks: runs one function in several processes that form a process group, and brings back what each returned.

    results = run(train, 4, settings)          # train(settings) in 4 processes; results[rank]
    gang = Gang(4); gang.run(build); gang.run(step); gang.close()   # the same processes for one call after another

Processes are forked from a server that has imported what they need and holds no state, so that a rank starts in
milliseconds and not in seconds. They meet through a file, so that no port can be in use. Where `torchrun` has already
started this many ranks, those are taken instead (`harness.machine.torchrun`).

When a rank raises or dies the others wait for it in a collective, so after a fault all are killed, with whatever they
have started themselves: at most `GRACE_S` after the fault was seen, or when the time is up. Nothing outlives the process
that called, either, be it killed. The error names the rank at fault (`harness.machine.rank_faults`).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import rank_faults, torchrun
from harness.machine.processes import end_with_parent, kill_group
from harness.machine.rank_faults import Fault, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess

__all__ = ["Fault", "Gang", "RanksError", "gpus_missing", "run"]

# By name, so that nothing here imports what stands above; what optimizers import when first used is the slowest.
PRELOADED = ["torch", "torch._dynamo", "harness.training.parallel.cells"]
TIMEOUT_S = 120.0
START_S = 120.0  # to start, import and meet
PASSED_ON = 4000  # characters of what a rank wrote to standard error during one call
GRACE_S = 3.0  # for the rank at fault to report, after another one has reported that its peer is gone
TIE_S = 0.1  # for a rank that was at fault a moment earlier
SIGN_S = 0.5  # for a rank that has not ended to say where it stands
DEBUG = "TORCH_DISTRIBUTED_DEBUG"  # torch's own: with DETAIL all ranks compare each collective before it runs


def run(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = TIMEOUT_S, device: str = "cpu"
) -> list[Any]:
    """Calls `fn(*args)` in `world` processes with torch.distributed initialised, one thread each.

    Where ranks seem to be in different collectives (gloo aborts on another size than it expects, or all wait in one and none
    ends) all is run once more from the start with collectives compared, at 2.5 times their time, so that the error can say
    which rank sends what.

    Args:
        fn: importable by name; `torch.distributed.get_rank()` tells it who it is.
        world: number of processes.
        args: picklable.
        timeout_s: for `fn`, from when all ranks have met; they have `START_S` to do so.
        device: "cpu": gloo. "cuda": NCCL for tensors on GPUs, of which rank i has the i-th, and gloo for the others.

    Returns:
        What each rank returned (picklable), by rank.

    Raises:
        RanksError: a rank raised (with its traceback), died, or the time was up; `rank` is the one at fault.
        ValueError: less than one rank, or more than there are GPUs.
    """
    if world < 1:
        raise ValueError(f"world={world}: expected at least one rank")
    if torchrun.started() == world:
        return torchrun.run(fn, args)
    if missing := gpus_missing(world, device):
        raise ValueError(missing)
    work = pickle.dumps((fn, args))  # refused here and not in every rank
    try:
        return _launch(work, world, timeout_s, device, dict(os.environ))
    except RanksError as error:
        if not error.out_of_step:
            raise
        try:
            _launch(work, world, timeout_s, device, {**os.environ, DEBUG: "DETAIL"})
        except RanksError as compared:
            if compared.differ:
                raise RanksError(str(compared), error.rank, differ=True) from error
        raise


def _launch(work: bytes, world: int, timeout_s: float, device: str, env: dict[str, str]) -> list[Any]:
    gang = Gang(world, device, env, first=work)
    try:
        return gang.do(work, timeout_s)
    finally:
        gang.close()


class Gang:
    """Processes that form a process group and make one call after another, each on all ranks at once.

    After a fault, and when nothing refers to it any more, none of the processes is left.

    Args:
        world: number of processes.
        device: as in `run`.
        env: their environment; None: that of this process.
        first: a function, pickled, whose module they import before they meet, so that no call waits for it.
        group: False: they form no process group, and only make calls.

    Attributes:
        fault: why it can be used no more; None while it can.

    Raises:
        RanksError: the ranks did not meet.
        ValueError: more ranks than there are GPUs.
    """

    fault: RanksError | None

    def __init__(
        self,
        world: int,
        device: str = "cpu",
        env: dict[str, str] | None = None,
        first: bytes = b"",
        *,
        group: bool = True,
    ) -> None:
        if missing := gpus_missing(world, device):
            raise ValueError(missing)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.world, self.fault = world, None
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[_Rank] = []
        # A worker leaves without atexit; multiprocessing's own finalizers run there before it joins its children
        self._end = Finalize(self, _end, (self._ranks, self._folder), exitpriority=10)
        environ = dict(os.environ) if env is None else env
        try:
            for rank in range(world):
                self._ranks.append(
                    _Rank(context, rank, world, Path(self._folder.name), device, first, environ, group)
                )
            _collect(self._ranks, START_S)  # they have met
        except BaseException:
            self.close()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args)` on all ranks.

        Args:
            fn: importable by name.
            args: picklable.
            timeout_s: for all of them to return.
            meanwhile: called here while they work.

        Returns:
            What each rank returned (picklable), by rank.

        Raises:
            RanksError: a rank raised, died or was late, in this call or an earlier one; the processes are gone.
        """
        return self.do(pickle.dumps((fn, args)), timeout_s, meanwhile)

    def do(self, work: bytes, timeout_s: float, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        """`run` of a function and arguments that are pickled already."""
        if self.fault is not None:
            raise RanksError(str(self.fault), self.fault.rank)
        try:
            for rank in self._ranks:
                rank.send(work)
            if meanwhile is not None:
                meanwhile()
            return _collect(self._ranks, timeout_s)
        except BaseException as error:  # an interrupt too leaves ranks in the middle of something
            # A copy: the error's traceback holds the frames that hold this, and with it the ranks of another arm
            self.fault = RanksError(str(error), getattr(error, "rank", None))
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        self.fault = self.fault or RanksError("the ranks have ended", None)
        self._end()


def _end(ranks: list[_Rank], folder: tempfile.TemporaryDirectory[str]) -> None:
    for one in ranks:
        one.kill()
    for one in ranks:
        one.end()
    folder.cleanup()


def gpus_missing(world: int, device: str) -> str | None:
    """Why a machine has no place for so many ranks; None where it has, as every CPU does."""
    if device != "cuda":
        return None
    import torch

    here = torch.cuda.device_count()
    return None if here >= world else f"{world} ranks need {world} GPUs; here are {here}"


class _Rank:
    """One process, seen from outside."""

    def __init__(
        self,
        context: Any,
        rank: int,
        world: int,
        folder: Path,
        device: str,
        first: bytes,
        env: dict[str, str],
        group: bool,
    ) -> None:
        self.rank = rank
        self.said = folder / f"stderr-{rank}"
        self._passed_on = 0  # characters
        self.ours, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, rank, world, folder / "store", self.said, device, first, env, group)
        )
        self.process.start()
        theirs.close()

    def send(self, work: bytes) -> None:
        """Gives it a call to make; that it is gone shows in its answer."""
        with suppress(OSError):
            self.ours.send_bytes(work)

    def answer(self) -> Any:
        """What it sends: (True, result) or a `Fault`; the first result says that it is in the group."""
        try:
            return self.ours.recv()
        except (EOFError, OSError):
            self.process.join()
            return rank_faults.died(self.rank, self.process.exitcode or 0, self._words())

    def where(self) -> str:
        """The stack of its main thread; "" where it gives no sign."""
        before = len(self._words())
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        ends = time.monotonic() + SIGN_S
        while time.monotonic() < ends and not self._words()[before:].endswith("\n"):
            time.sleep(0.01)
        return self._words()[before:]

    def pass_on(self) -> None:
        """Writes what it has said since the last time to standard error of this process, its end where that is long."""
        words = self._words()
        new, self._passed_on = words[self._passed_on :][-PASSED_ON:], len(words)
        if new:
            text = "".join(f"rank {self.rank}: {line}\n" for line in new.splitlines())
            with suppress(OSError):
                os.write(2, text.encode(errors="replace"))

    def _words(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""

    def kill(self) -> None:
        """Ends it and what it has started."""
        kill_group(self.process.pid or 0)
        self.process.kill()

    def end(self) -> None:
        """Waits until it is gone."""
        self.process.join()
        self.ours.close()


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    """An answer of each rank."""
    results: dict[int, Any] = {}
    faults: list[Fault] = []
    waiting = list(ranks)
    ends = time.monotonic() + timeout_s
    while waiting:
        ready = wait([r.ours for r in waiting], max(0.0, ends - time.monotonic()))
        if not ready:
            break
        for rank in [r for r in waiting if r.ours in ready]:
            answer = rank.answer()
            waiting.remove(rank)
            if isinstance(answer, Fault):
                faults.append(answer)
                ends = min(ends, time.monotonic() + (GRACE_S if answer.of_a_peer else TIE_S))
            else:
                results[rank.rank] = answer[1]
    for rank in ranks:
        rank.pass_on()
    if faults:
        raise rank_faults.error(faults, len(ranks))
    if waiting:
        raise rank_faults.late({r.rank: r.where() for r in waiting}, set(results), len(ranks), timeout_s)
    return [results[rank.rank] for rank in ranks]


def _serve(
    parent: Connection,
    rank: int,
    world: int,
    store: Path,
    said: Path,
    device: str,
    first: bytes,
    env: dict[str, str],
    group: bool,
) -> None:
    """The process of one rank: makes the calls that it is given, and stays until it is killed: others may need it."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the parent, and a kill reaches what this process starts
    end_with_parent()
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.environ.clear()  # that of the server is of the time when it started
    os.environ.update(env)
    if group:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import set_debug_level_from_env

    torch.set_num_threads(1)
    if group:
        set_debug_level_from_env()

    def meet() -> None:
        if first:
            pickle.loads(first)
        if device == "cuda":
            torch.cuda.set_device(rank)
        if not group:
            return
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)

    def called() -> Any:
        fn, args = pickle.loads(work)
        return fn(*args)

    call: Callable[[], Any] = meet
    while True:
        try:
            answer: Any = (True, call())
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises is told
            answer = rank_faults.raised(rank, error)
        try:
            parent.send(answer)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            parent.send(rank_faults.raised(rank, error))
        try:
            work = parent.recv_bytes()
        except (EOFError, OSError):
            threading.Event().wait()  # until `end_with_parent` sees it
        call = called
