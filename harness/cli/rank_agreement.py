"""What the ranks of a job tell each other: facts, rank 0's findings, and whether one folder is the same for all."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEEN_S = 10.0  # a network file system may show a new file so late


def gathered(mine: Any) -> list[Any]:
    """What each rank has, in their order."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def hosts() -> list[str]:
    """The node of each rank, under Slurm by its name there."""
    return gathered(os.environ.get("SLURMD_NODENAME") or socket.gethostname())


def from_first(fn: Callable[[], Any]) -> Any:
    """What `fn()` returns on rank 0, on every rank.

    Raises:
        UsageError: on every rank, where it refuses.
    """
    box: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            box[0] = fn()
        except UsageError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1]:
        raise UsageError(box[1])
    return box[0]


def together(fn: Callable[[], Any]) -> Any:
    """What `fn()` returns on this rank.

    Raises:
        UsageError: on every rank, where it refuses on one of them.
    """
    found, why = None, ""
    try:
        found = fn()
    except UsageError as error:
        why = str(error)
    refused = gathered(why)
    if any(refused):
        rank = next(r for r, text in enumerate(refused) if text)
        raise UsageError(
            refused[rank] if all(refused) else f"rank {rank} on {hosts()[rank]}: {refused[rank]}"
        )
    return found


def leave_word(key: str, word: str) -> None:
    """Leaves a word for the other ranks in the store of the group, where no stuck collective can block it."""
    dist.distributed_c10d._get_default_store().set(f"harness/{key}", word)


def word_left(key: str) -> str:
    """The last word that a rank has left; "" where there is none, or the store is gone."""
    store: Any = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):  # dist.DistError is one
        if store.check([f"harness/{key}"]):
            return str(store.get(f"harness/{key}").decode())
    return ""


def refuse_other_facts(facts: dict[str, str]) -> None:
    """Ranks of one job have the same settings, data and code.

    Raises:
        UsageError: on every rank; the first rank that differs is named.
    """
    every, places = gathered(facts), hosts()
    for name, first in every[0].items():
        for rank, theirs in enumerate(every):
            if theirs[name] != first:
                raise UsageError(
                    f"{name}: rank {rank} on {places[rank]} has {theirs[name]}, rank 0 on {places[0]} {first}; "
                    "give all nodes the same"
                )


def refuse_unshared(folder: Path, key: str) -> None:
    """All ranks write into one folder, made where it is missing.

    Args:
        folder: to look at.
        key: "name=value" of the command line that chose it.

    Raises:
        UsageError: on every rank: one cannot write to it, or writes to another folder of that name.
    """
    token = from_first(lambda: f".seen-{time.time_ns():x}")
    rank, places = dist.get_rank(), hosts()
    mine, why = folder / f"{token}-{rank}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()
    except OSError as error:
        why = error.strerror or str(error)
    try:
        for other, problem in enumerate(gathered(why)):
            if problem:
                raise UsageError(
                    f"{key}: rank {other} on {places[other]} cannot write there ({problem}); name a folder that all nodes can "
                    "write to"
                )
        unseen = from_first(lambda: _unseen(folder, token))
        if unseen is not None:
            raise UsageError(
                f"{key} is not shared: what rank {unseen} on {places[unseen]} writes, rank 0 on {places[0]} does not see; "
                "name a folder on a file system that all nodes mount"
            )
    finally:
        if not why:
            mine.unlink(missing_ok=True)


def _unseen(folder: Path, token: str) -> int | None:
    """The first rank whose file does not show here; None where all do."""
    deadline = time.monotonic() + SEEN_S
    while True:
        there = {path.name for path in folder.iterdir()}
        missing = [rank for rank in range(dist.get_world_size()) if f"{token}-{rank}" not in there]
        if not missing or time.monotonic() > deadline:
            return missing[0] if missing else None
        time.sleep(0.1)
