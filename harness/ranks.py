"""Ranks: runs one function in several processes that form a process group, and brings back what each returned.

    results = run(train, 4, settings)          # train(settings) in 4 processes; results[rank]

Processes are forked from a server that has imported torch and nothing else that holds state, so that a rank starts in
milliseconds and not in seconds. They meet through a file, so that no port can be in use. When one rank raises or dies
the others are killed, since they wait for it in a collective; when the time is up, all are.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
TIMEOUT_S = 120.0
GRACE_S = 3.0  # for the rank at fault to report, after another one has reported that its peer is gone


class RanksError(RuntimeError):
    """A rank raised, died or did not end in time; the message names it."""


def run(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Calls `fn(*args)` in `world` processes with torch.distributed initialised (gloo, one thread each).

    Args:
        fn: importable by name, or picklable otherwise; `torch.distributed.get_rank()` tells it who it is.
        world: number of processes.
        args: picklable.
        timeout_s: for all of it.

    Returns:
        What each rank returned (picklable), by rank.

    Raises:
        RanksError: a rank raised (with its traceback), died, or the time was up.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(context, rank, world, Path(folder) / "store", fn, args) for rank in range(world)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """One process, seen from outside."""

    def __init__(
        self, context: Any, rank: int, world: int, store: Path, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.rank = rank
        self.ours, theirs = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, rank, world, store, fn, args)
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.ours.close()


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    faults: dict[int, str] = {}
    ends = time.monotonic() + timeout_s
    while len(results) + len(faults) < len(ranks):
        waiting = [r for r in ranks if r.rank not in results and r.rank not in faults]
        ready = wait([r.ours for r in waiting], max(0.0, ends - time.monotonic()))
        if not ready:
            if not faults:
                names = ", ".join(str(r.rank) for r in waiting)
                raise RanksError(f"no answer from rank {names} of {len(ranks)} within {timeout_s:g} s")
            break
        for rank in waiting:
            if rank.ours in ready:
                try:
                    ok, answer = rank.ours.recv()
                except EOFError:
                    rank.process.join()
                    faults[rank.rank] = f"died with exit code {rank.process.exitcode}"
                else:
                    (results if ok else faults)[rank.rank] = answer
        if faults:
            ends = min(ends, time.monotonic() + GRACE_S)
    if faults:
        guilty = min(faults, key=lambda rank: ("Connection" in faults[rank], rank))
        raise RanksError(f"rank {guilty} of {len(ranks)}: {faults[guilty]}")
    return [results[rank.rank] for rank in ranks]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _serve(
    parent: Connection, rank: int, world: int, store: Path, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The process of one rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        answer = (True, fn(*args))
        dist.barrier()  # nobody leaves while another one still needs it
    except BaseException:
        answer = (False, traceback.format_exc())
    parent.send(answer)
    parent.close()
    if dist.is_initialized():
        dist.destroy_process_group()
