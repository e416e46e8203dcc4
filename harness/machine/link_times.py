"""Link times: what each rank does when links are timed; started by `harness.machine.ranks`.

All groups of ranks measure one after the other, so that no two share a link. A round goes through all of them in random
order, and rounds go on for `Survey.least_s`, so that what slows the machine for a while falls on some rounds of many links and
not on all rounds of one. Before each group's turn all ranks meet on the CPU. A group's time is that of its slowest rank; of a message that of its sender, until the receiver has answered
with 4 bytes, so that no two clocks are compared. In a round before the first, which is not timed, what arrived is checked.

On a GPU several calls are queued between two events, as nccl-tests does; there this has never run.
"""

from __future__ import annotations

import math
import os
import random
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.machine import link_check
from harness.machine.environment import hashed
from harness.machine.gpu_monitor import GpuMonitor, monitor_for
from harness.machine.links import (
    ALL_GATHER,
    ALL_REDUCE,
    ELEMENT,
    REDUCE_SCATTER,
    SEND,
    End,
    Members,
    groups,
    undivided,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# torch 2.13 renamed them
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NODE = ("GROUP_RANK", "SLURM_NODEID")  # what torchrun and srun call the place of a node


@dataclass(frozen=True, slots=True)
class Survey:
    """What is timed: an operation on so many bytes, by all groups of ranks.

    Attributes:
        operation: which.
        size: bytes.
        rounds: samples of each group, at least.
        most: samples of each group, at most.
        least_s: seconds for which rounds go on, if `most` allows.
        budget_s: seconds after which no other round begins, even if there were fewer than `rounds`; one is always made.
        seed: of the order within a round.
        device: "cpu" or "cuda".
    """

    operation: str
    size: int
    rounds: int
    most: int = 50
    least_s: float = 0.0
    budget_s: float = math.inf
    seed: int = 0
    device: str = "cpu"


@dataclass(slots=True)
class RankTimes:
    """What one rank saw.

    Attributes:
        end: who it is.
        backend: that carried the bytes.
        seconds: of one call, by round, of each group that this rank was in and kept the time of.
        wrong: what did not arrive as it was sent; "" where all did.
        wrong_part: the group in which it did not.
    """

    end: dict[str, Any]
    backend: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: str = ""
    wrong_part: str = ""


def calls(device: str, size: int) -> int:
    """Calls of one sample: nccl-tests' default is 20; fewer of large messages, and one on a CPU, where each takes long enough."""
    if device == "cpu":
        return 1
    return 20 if size <= 2**24 else 5


def measure(survey: Survey) -> RankTimes:
    """This rank's part of a survey."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [
        members
        for members in groups(survey.operation, world)
        if not undivided(survey.operation, survey.size, len(members.ranks))
    ]
    device = "cpu" if survey.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    seen = RankTimes(end_here(rank, device).as_dict(), "nccl" if survey.device == "cuda" else "gloo")
    # Every rank makes every group, in the same order; a message needs none
    made = {
        m: dist.new_group(list(m.ranks)) if not m.directed and len(m.ranks) < world else None for m in parts
    }
    turn, began = -1, time.monotonic()
    while turn < 1 or _go_on(survey, turn, time.monotonic() - began):
        order = random.Random(f"{survey.seed} {turn}").sample(parts, len(parts))  # the same in all ranks
        for members in order:
            dist.all_reduce(torch.zeros(1))  # on the CPU: all have ended what came before
            if rank not in members.ranks:
                continue
            call = _Call(survey, members, rank, made[members], device)
            if turn < 0:
                if not seen.wrong and (wrong := call.check()):
                    seen.wrong, seen.wrong_part = wrong, str(members)
                continue
            took = call.seconds()
            if not members.directed or rank == members.ranks[0]:
                seen.seconds.setdefault(str(members), []).append(took)
        turn += 1
    for group in made.values():
        if group is not None:
            dist.destroy_process_group(group)
    return seen


def _go_on(survey: Survey, turn: int, elapsed_s: float) -> bool:
    """Whether another round is due; all ranks ask, and rank 0's clock decides."""
    wanted = turn < survey.rounds or (turn < survey.most and elapsed_s < survey.least_s)
    due = torch.tensor([float(wanted and elapsed_s < survey.budget_s)])
    dist.broadcast(due, src=0)
    return bool(due.item())


def end_here(rank: int, device: str) -> End:
    """Who this rank is; its GPU's links by NVML."""
    # Two machines may have one name, and one number of a network namespace; a boot they don't share
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = hashed(socket.gethostname())
    host = hashed(f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}")
    namespace = Path("/proc/self/ns/net")
    network = hashed(f"{host} {namespace.stat().st_ino if namespace.exists() else ''}")
    node = next((int(os.environ[name]) for name in _NODE if os.environ.get(name, "").isdecimal()), 0)
    if device == "cpu":
        return End(rank, node, host, network, device, machine=machine)
    properties = torch.cuda.get_device_properties(device)
    linked, passed = None, None
    with monitor_for(device) as monitor:
        if isinstance(monitor, GpuMonitor):
            linked, passed = monitor.nvlinked(), monitor.pcie_paths()
    known = None if linked is None else tuple(hashed(uuid) for uuid in linked)
    paths = None if passed is None else tuple((hashed(uuid), path) for uuid, path in passed.items())
    uuid = hashed(str(properties.uuid))
    return End(rank, node, host, network, device, uuid, known, properties.name, paths, machine)


class _Call:
    """One operation of a group, ready to be called."""

    def __init__(self, survey: Survey, members: Members, rank: int, group: Any, device: str) -> None:
        self.survey, self.members, self.rank, self.group, self.device = survey, members, rank, group, device
        elements, n = survey.size // ELEMENT, len(members.ranks)
        share = elements // n
        # zeros: a sum of them stays finite however often it is made
        self.data = torch.zeros(share if survey.operation == ALL_GATHER else elements, device=device)
        received = {ALL_GATHER: elements, REDUCE_SCATTER: share}.get(survey.operation, 0)
        self.out = torch.empty(received, device=device)  # nothing that an earlier call left passes the check
        self.answer = torch.zeros(1, device=device)

    def run(self) -> None:
        """The operation, once."""
        if self.survey.operation == SEND:
            one, other = self.members.ranks
            if self.rank == one:
                dist.send(self.data, other)
            else:
                dist.recv(self.data, one)
        elif self.survey.operation == ALL_REDUCE:
            dist.all_reduce(self.data, group=self.group)
        elif self.survey.operation == ALL_GATHER:
            _gather(self.out, self.data, group=self.group)
        else:
            _scatter(self.out, self.data, group=self.group)

    def seconds(self) -> float:
        """Time of one call, by the clock of this rank."""
        count = calls(self.survey.device, self.survey.size)

        def timed() -> None:
            for _ in range(count):
                self.run()
            if self.members.directed:
                self._answered()

        return (_by_events if self.survey.device == "cuda" else _by_clock)(timed) / count

    def check(self) -> str:
        """What arrived otherwise than it was sent; "" for nothing."""
        what = self.survey.operation
        link_check.fill(self.data, what, self.members, self.rank)
        self.run()
        if what == SEND:
            self._answered()
            if self.rank == self.members.ranks[0]:
                return ""
        got = self.data if what in (SEND, ALL_REDUCE) else self.out
        return link_check.wrong(got, what, self.members, self.rank)

    def _answered(self) -> None:
        one, other = self.members.ranks
        if self.rank == one:
            dist.recv(self.answer, other)
        else:
            dist.send(self.answer, one)


def _by_clock(timed: Callable[[], None]) -> float:
    started = time.perf_counter()
    timed()
    return time.perf_counter() - started


def _by_events(timed: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    timed()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
