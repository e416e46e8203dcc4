"""Torchrun: the processes that `torchrun` has started, on this host and on others, as ranks of `harness.machine.ranks`.

    torchrun --nproc-per-node=2 -m harness sweep=allgather ranks=2

Rank 0 is the command: it plans, stores and reports. Every process, rank 0's too, computes in a process that it starts for one
group of ranks, so that a fault ends the group and not the command. The others are linked to rank 0 by a connection each, over
which the kernel asks for signs of life: the end of a process is seen at once, a host that is cut off after `SILENT_S`. The
ranks of that host are then lost until all are started again; what was stored before is intact.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import rank_faults
from harness.machine.rank_faults import Fault
from harness.machine.rank_links import (
    ASK_S,
    END_S,
    WAY,
    Link,
    gathered,
    gone,
    interface_of,
    is_loopback,
    linked,
    name_of,
    pair,
)
from harness.machine.rank_process import SIGN_S, Group, Rank, write_news
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started() -> int:
    """How many ranks torchrun, or a launcher that sets what it sets, has started; 0 where this is not one of them.

    Raises:
        UsageError: what it has set are no such numbers.
    """
    if not all(os.environ.get(name) for name in _GIVEN):
        return 0
    world = _number("WORLD_SIZE", 1)
    _number("RANK", 0, world - 1)
    _number("MASTER_PORT", 0, 65535)
    return world


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(
            f"{name}={text}: expected an integer {span}; torchrun sets it, unset it to run without other ranks"
        )
    return int(text)


def of_a_host() -> int:
    """How many of them are on this host, as torchrun says; 1 where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def leads(world: int) -> bool:
    """Whether this process is rank 0 of so many, linked to all others."""
    return bool(_links) and len(_links) + 1 == world


def hosts(world: int) -> int:
    """On how many hosts a group of so many ranks computes."""
    far = {link.address for link in _links if not is_loopback(link.address)}
    return len(far | {_own_address[0]}) if leads(world) else 1


def shared(command: Callable[[], int]) -> int:
    """The exit code of a command; of several ranks, the first one runs it and the others help.

    Raises:
        UsageError: the ranks cannot meet; or this is another one than rank 0, which is gone.
    """
    world = started()
    if world < 2:
        return command()
    rank = int(os.environ["RANK"])
    if rank:
        return _follow(linked(rank, world), rank, world)
    _own_address[0], _links[:] = gathered(world)
    try:
        return command()
    finally:
        for link in _links:
            link.send("leave")
            link.connection.close()
        _links.clear()


def group(
    world: int, device: str, folder: Path, first: bytes, env: Mapping[str, str]
) -> list[Rank | FarRank]:
    """On rank 0: a process in each of the ranks, which join one group.

    Raises:
        RanksError: a rank is lost since an earlier group.
    """
    lost = [link.lost for link in _links if link.lost is not None]
    if lost:
        raise rank_faults.error(lost, world)
    import torch.distributed as dist

    store = dist.TCPStore(_own_address[0], 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    meeting, interface = pair(_own_address[0], store.port), interface_of(_own_address[0])
    own = Group(world, device, meeting, interface, _local_rank())
    extra = {name: value for name, value in env.items() if os.environ.get(name) != value}
    number = next(_numbers)
    others = [FarRank(link, number, store) for link in _links]
    for link in _links:
        # One that came by this host's loopback sees nothing of the network from there
        near = (meeting, interface) if is_loopback(link.address) else None
        link.send("start", number, world, device, store.port, near, first, extra)
    return [Rank(0, own, folder, first, env), *others]


_links: list[Link] = []  # of rank 0, by rank; none in any other process
_own_address = [""]  # of rank 0, by which the others have reached it
_numbers = itertools.count()  # of groups


class FarRank:
    """A rank of another process than this one's children; as `harness.machine.rank_process.Rank`."""

    def __init__(self, link: Link, number: int, store: object) -> None:
        self.rank, self.ours = link.rank, link.connection
        self._link, self._number, self._news = link, number, ""
        self._store = store  # kept while its group may ask it

    def send(self, work: bytes) -> None:
        """Gives it a call to make."""
        self._link.send("work", self._number, work)

    def answer(self) -> Any:
        """What it sends: (True, result) or a `Fault`."""
        message = self._link.receive()
        if isinstance(message, Fault):
            return message
        answer, self._news = message
        if isinstance(answer, Fault):  # by the clock of this machine
            return replace(answer, at=time.monotonic(), host=f"{self._link.host}, {self._link.address}")
        return answer

    def where(self) -> str:
        """The stack of its main thread; "" where it gives no sign."""
        self._link.send("where", self._number)
        return self._told(str, SIGN_S + ASK_S) or ""

    def pass_on(self) -> None:
        """Writes what came with its answer to standard error of this process."""
        write_news(self.rank, self._news)
        self._news = ""

    def kill(self) -> None:
        """Ends its process of this group."""
        if self._link.lost is None:
            self._link.send("end", self._number)

    def end(self) -> None:
        """Waits until that is gone."""
        if self._link.lost is None and self._told(bool, END_S) is None and self._link.lost is None:
            self._link.lost = Fault(
                self.rank, time.monotonic(), f"gave no answer; {WAY}", host=self._link.host, lost=True
            )

    def _told(self, kind: type, seconds: float) -> Any:
        """The next message of a kind; others, which came too late, are dropped."""
        until = time.monotonic() + seconds
        while self.ours.poll(max(0.0, until - time.monotonic())):
            message = self._link.receive()
            if isinstance(message, (kind, Fault)):
                return None if isinstance(message, Fault) else message
        return None


def _follow(link: Link, rank: int, world: int) -> int:
    """Does what rank 0 asks for, until it lets this process go."""
    mine: dict[int, Rank] = {}  # by the number of their group
    silent: set[int] = set()  # those whose process has ended
    with tempfile.TemporaryDirectory() as folder:
        try:
            while True:
                waited = {one.ours: (n, one) for n, one in mine.items() if n not in silent}
                for ready in wait([link.connection, *waited]):
                    if ready is not link.connection:
                        number, one = waited[ready]  # type: ignore[index]
                        if (
                            number not in mine
                        ):  # ended just now: the next group would take its answer for its own
                            continue
                        answer = one.answer()
                        silent |= {number} if one.process.exitcode is not None else set()
                        # Not `send`: it would share a tensor's memory, which another host has not
                        link.connection.send_bytes(pickle.dumps((answer, one.news())))
                        continue
                    message = link.receive()
                    if isinstance(message, Fault):
                        raise UsageError(f"rank {rank} of {world}: rank 0 ({message.host}): {message.text}")
                    if message[0] == "leave":
                        return 0
                    _obey(message, link, rank, mine, Path(folder))
        except OSError as error:
            raise UsageError(
                f"rank {rank} of {world}: rank 0 ({link.host}, {link.address}): {gone(error)}; {WAY}"
            ) from error
        finally:
            for one in mine.values():
                one.kill()
                one.end()


def _obey(message: tuple[Any, ...], link: Link, rank: int, mine: dict[int, Rank], folder: Path) -> None:
    what, number, *rest = message
    if what == "start":
        world, device, port, near, first, extra = rest
        meeting, interface = near or (pair(link.address, port), interface_of(name_of(link.connection)))
        group_here = Group(world, device, meeting, interface, _local_rank())
        own = folder / str(number)
        own.mkdir()
        mine[number] = Rank(rank, group_here, own, first, {**os.environ, **extra})
    elif what == "work":
        mine[number].send(rest[0])
    elif what == "where":
        link.connection.send(mine[number].where())
    else:
        one = mine.pop(number)
        one.kill()
        one.end()
        link.connection.send(True)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
