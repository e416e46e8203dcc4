"""Ranks: runs one function in several processes that form a process group, and brings back what each returned.

    results = run(train, 4, settings)          # train(settings) in 4 processes; results[rank]
    gang = Gang(4); gang.run(build); gang.run(step); gang.close()   # the same processes for one call after another

Processes are forked from a server that has imported what they need and holds no state, so that a rank starts in
milliseconds and not in seconds. They meet through a file, so that no port can be in use. Where `torchrun` has already
started this many ranks, those are taken instead (`harness.machine.torchrun`).

When a rank raises or dies the others wait for it in a collective, so after a fault all are killed, with whatever they
have started themselves: at most `GRACE_S` after the fault was seen, or when the time is up. Nothing outlives the process
that called, either, be it killed. The error names the rank at fault (`harness.machine.rank_process`).
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import rank_process, torchrun
from harness.machine.processes import patience
from harness.machine.rank_process import Fault, Group, Rank, RanksError
from harness.machine.torchrun import hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.machine.torchrun import FarRank

__all__ = ["Fault", "Gang", "RanksError", "gpus_missing", "hosts", "run"]

TIMEOUT_S = 120.0
START_S = 120.0  # to start, import and meet
GRACE_S = 3.0  # for the rank at fault to report, after another one has reported that its peer is gone
TIE_S = 0.1  # for a rank that was at fault a moment earlier


def run(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = TIMEOUT_S, device: str = "cpu"
) -> list[Any]:
    """Calls `fn(*args)` in `world` processes with torch.distributed initialised, one thread each.

    Where ranks may be in different collectives (gloo aborts on another size than it expects, or all wait in one and none ends)
    TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment has torch compare them, at 2.5 times their time, and say which sends what.

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
    if missing := gpus_missing(world, device):
        raise ValueError(missing)
    work = pickle.dumps((fn, args))  # refused here and not in every rank
    gang = Gang(world, device, first=work)
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
        first: a function, pickled, whose module they import before they meet, so that no call waits for it.

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
        first: bytes = b"",
    ) -> None:
        if missing := gpus_missing(world, device):
            raise ValueError(missing)
        self.world, self.fault = world, None
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[Rank | FarRank] = []
        # A worker leaves without atexit; multiprocessing's own finalizers run there before it joins its children
        self._end = Finalize(self, _end, (self._ranks, self._folder), exitpriority=10)
        environ = dict(os.environ)
        folder = Path(self._folder.name)
        try:
            if torchrun.leads(world):
                self._ranks += torchrun.group(world, device, folder, first, environ)
            else:
                for rank in range(world):
                    own = Group(world, device, str(folder / "store"), "lo", rank)
                    self._ranks.append(Rank(rank, own, folder, first, environ))
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


def _end(ranks: list[Rank | FarRank], folder: tempfile.TemporaryDirectory[str]) -> None:
    for one in ranks:
        one.kill()
    until = patience()
    for one in ranks:
        one.end(until)
    folder.cleanup()


def gpus_missing(world: int, device: str) -> str | None:
    """Why a machine has no place for so many ranks; None where it has, as every CPU does."""
    if device != "cuda":
        return None
    import torch

    here = torch.cuda.device_count()
    if torchrun.leads(world):
        world = torchrun.of_a_host()
    return None if here >= world else f"{world} ranks need {world} GPUs; here are {here}"


def _collect(ranks: list[Rank | FarRank], timeout_s: float) -> list[Any]:
    """An answer of each rank."""
    results: dict[int, Any] = {}
    faults: list[Fault] = []
    waiting = list(ranks)
    ends = time.monotonic() + timeout_s
    # On another host a rank at fault may be gone with it, which shows by its silence
    grace_s = GRACE_S if hosts(len(ranks)) == 1 else GRACE_S + 2 * torchrun.SILENT_S
    while waiting:
        ready = wait([r.ours for r in waiting], max(0.0, ends - time.monotonic()))
        if not ready:
            break
        for rank in [r for r in waiting if r.ours in ready]:
            answer = rank.answer()
            waiting.remove(rank)
            if isinstance(answer, Fault):
                faults.append(answer)
                ends = min(ends, time.monotonic() + (grace_s if answer.of_a_peer else TIE_S))
            else:
                results[rank.rank] = answer[1]
    for rank in ranks:
        rank.pass_on()
    if faults:
        raise rank_process.error(faults, len(ranks))
    if waiting:
        raise rank_process.late({r.rank: r.where() for r in waiting}, set(results), len(ranks), timeout_s)
    return [results[rank.rank] for rank in ranks]
