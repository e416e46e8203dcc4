"""Ranks: how the processes of one arm form a process group, and which of them is at fault.

They meet through a file, so that no port can be in use; where `torchrun` has started as many ranks, through its store
(`harness.machine.torchrun`). When one raises or dies, the others wait for it in a collective.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.machine import torchrun
from harness.store.errors import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a rank sees of another one's end, by gloo, NCCL and the store
_OF_A_PEER = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|DistStore|store timed out", re.I
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[^/]*)/")


class Meeting(NamedTuple):
    """A process group, as each of its ranks knows it.

    Attributes:
        world: ranks.
        device: "cpu": gloo. "cuda": NCCL for tensors on GPUs, and gloo for the others.
        store: where they meet: a file, or address:port|prefix of torch's store.
        patience_s: for a collective; longer than whoever waits for the ranks.
        hosts: on how many they are.
    """

    world: int
    device: str
    store: str
    patience_s: float
    hosts: int = 1


class Seat(NamedTuple):
    """A rank's place: its number, its GPU, the interface of the network for gloo."""

    rank: int
    gpu: int
    interface: str
    meeting: Meeting

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.meeting.world}"


_joined: list[Meeting] = []  # of this process


def join(seat: Seat) -> None:
    """Forms the group. TORCH_DISTRIBUTED_DEBUG=DETAIL has torch compare the ranks' collectives, at 2.5 times their time."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import set_debug_level_from_env

    meeting = seat.meeting
    set_debug_level_from_env()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", seat.interface)
    if meeting.device == "cuda":
        torch.cuda.set_device(seat.gpu)
    if meeting.store.startswith("/"):
        store: Any = dist.FileStore(meeting.store, meeting.world)  # type: ignore[attr-defined]
    else:
        where, _, prefix = meeting.store.partition("|")
        address, _, port = where.rpartition(":")
        store = dist.PrefixStore(prefix, dist.TCPStore(address, int(port), is_master=False))  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if meeting.device == "cuda" else "gloo",
        store=store,
        rank=seat.rank,
        world_size=meeting.world,
        timeout=timedelta(seconds=meeting.patience_s),
    )
    _joined.append(meeting)


def hosts() -> int:
    """On how many hosts the group of this process computes."""
    return _joined[0].hosts if _joined else 1


def gpus_missing(world: int, device: str) -> str | None:
    """Why a machine has no place for so many ranks; None where it has, as every CPU does."""
    if device != "cuda":
        return None
    import torch

    here = torch.cuda.device_count()
    if torchrun.started() == world > 1:
        world = torchrun.of_a_host()
    return None if here >= world else f"{world} ranks need {world} GPUs; here are {here}"


def of_a_peer(error: BaseException) -> bool:
    """Whether a rank only saw that another one was gone."""
    return isinstance(error, RuntimeError) and bool(_OF_A_PEER.search(text_of(error)))


def late(stacks: Mapping[int, str], ended: set[int], world: int) -> tuple[int | None, str]:
    """Which of the ranks that have not ended in time is at fault, None where that is open, and where all stand.

    Args:
        stacks: of each of them, what faulthandler wrote of its main thread.
        ended: the ranks that have.
        world: number of ranks.
    """
    stands = {rank: _stands(stack) for rank, stack in stacks.items()}
    idle = [rank for rank, (collective, _) in stands.items() if not collective]
    # The odd one out: in no collective where others are, gone while others wait, or waiting in a place of its own.
    alone = [rank for rank, at in stands.items() if list(stands.values()).count(at) == 1]
    suspects = idle or sorted(ended) or alone
    guilty = suspects[0] if len(suspects) == 1 else None
    lines = [
        f"rank {rank} {collective or 'is in no collective,'} {at}"
        for rank, (collective, at) in stands.items()
    ]
    lines += [f"rank {rank} has returned" for rank in sorted(ended)]
    at_fault = "" if guilty is None else f"rank {guilty} of {world} is at fault: "
    if not idle:  # all wait, maybe in different ones
        lines.append("with TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares the ranks' collectives")
    return guilty, at_fault + "; ".join(lines)


def _stands(stack: str) -> tuple[str, str]:
    """Which collective a stack waits in ("" for none), and the place in a caller's own code."""
    frames: list[Any] = [match for line in stack.splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return "", "gives no sign of life"
    own = next((i for i, frame in enumerate(frames) if not _LIBRARY.search(frame["file"])), len(frames) - 1)
    calls = [frame["name"] for frame in frames[:own] if "/torch/distributed/" in frame["file"]]
    named = next((name for name in reversed(calls) if name != "wrapper"), "")
    place = frames[own]
    return f"waits in {named}" if named else "", f"at {place['file']}:{place['line']} in {place['name']}"
