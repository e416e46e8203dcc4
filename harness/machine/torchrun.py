"""Torchrun: the processes that `torchrun` has started, on this host and on others, as ranks of `harness.machine.ranks`.

    torchrun --nproc-per-node=2 -m harness sweep=allgather ranks=2

Rank 0 is the command: it plans, stores and reports. Every process, rank 0's too, computes in a process that it starts for one
group of ranks, so that a fault ends the group and not the command. The others are linked to rank 0 by a connection each, over
which the kernel asks for signs of life: the end of a process is seen at once, a host that is cut off after `SILENT_S`. The
ranks of that host are then lost until all are started again; what was stored before is intact.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import os
import pickle
import secrets
import socket
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from harness.machine import rank_faults, raw_output
from harness.machine.rank_faults import Fault
from harness.machine.rank_process import SIGN_S, Group, Rank, write_news
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEET_S = 120.0  # for all of them to come
SILENT_S = 20  # without a sign of life of another host's kernel, after which that host is cut off
_ASK_S = 5  # between two questions for one
_END_S = 10.0  # for a process to end that was killed
_KEY_BYTES = 32
_WAY = "start all ranks again, with resume=RUN where there is a run"


def started() -> int:
    """How many ranks torchrun, or a launcher that sets what it sets, has started; 0 where this is not one of them."""
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in _GIVEN) else 0


def of_a_host() -> int:
    """How many of them are on this host, as torchrun says; 1 where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def leads(world: int) -> bool:
    """Whether this process is rank 0 of so many, linked to all others."""
    return bool(_links) and len(_links) + 1 == world


def hosts(world: int) -> int:
    """On how many hosts a group of so many ranks computes."""
    return len({link.address for link in _links} | {_own_address[0]}) if leads(world) else 1


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
        return _follow(_linked(rank, world), rank, world)
    _links[:] = _gathered(world)
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

    store = dist.TCPStore(_own_address[0], 0, is_master=True, wait_for_workers=False)
    own = Group(world, device, _pair(_own_address[0], store.port), _interface(_own_address[0]), _local_rank())
    extra = {name: value for name, value in env.items() if os.environ.get(name) != value}
    number = next(_numbers)
    others = [FarRank(link, number, store) for link in _links]
    for link in _links:
        link.send("start", number, world, device, store.port, first, extra)
    return [Rank(0, own, folder, first, env), *others]


@dataclass(eq=False)
class _Link:
    """The connection between rank 0 and another one.

    Attributes:
        rank: the other one, seen from rank 0.
        host: its name.
        address: of that host.
        lost: what became of it; None while it is there.
    """

    connection: Connection
    rank: int
    host: str
    address: str
    lost: Fault | None = None

    def send(self, *message: Any) -> None:
        """That the other one is gone shows when it is to answer."""
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """The next message; the fault where there is none."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            where = f"{self.host}, {self.address}"
            self.lost = Fault(self.rank, time.monotonic(), f"{_gone(error)}; {_WAY}", host=where, lost=True)
            return self.lost


_links: list[_Link] = []  # of rank 0, by rank; none in any other process
_own_address = [""]  # of rank 0, by which the others have reached it
_numbers = itertools.count()  # of groups


class FarRank:
    """A rank of another process than this one's children; as `harness.machine.rank_process.Rank`."""

    def __init__(self, link: _Link, number: int, store: object) -> None:
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
        return self._told(str, SIGN_S + _ASK_S) or ""

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
        if self._link.lost is None:
            self._told(bool, _END_S)

    def _told(self, kind: type, seconds: float) -> Any:
        """The next message of a kind; others, which came too late, are dropped."""
        until = time.monotonic() + seconds
        while self.ours.poll(max(0.0, until - time.monotonic())):
            message = self._link.receive()
            if isinstance(message, (kind, Fault)):
                return None if isinstance(message, Fault) else message
        return None


def _follow(link: _Link, rank: int, world: int) -> int:
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
                        answer = one.answer()
                        silent |= {number} if one.process.exitcode is not None else set()
                        link.connection.send((answer, one.news()))
                        continue
                    message = link.receive()
                    if isinstance(message, Fault):
                        raise UsageError(f"rank {rank} of {world}: rank 0 ({message.host}): {message.text}")
                    if message[0] == "leave":
                        return 0
                    _obey(message, link, rank, mine, Path(folder))
        except OSError as error:
            raise UsageError(
                f"rank {rank} of {world}: rank 0 ({link.host}, {link.address}): {_gone(error)}; {_WAY}"
            ) from error
        finally:
            for one in mine.values():
                one.kill()
                one.end()


def _obey(message: tuple[Any, ...], link: _Link, rank: int, mine: dict[int, Rank], folder: Path) -> None:
    what, number, *rest = message
    if what == "start":
        world, device, port, first, extra = rest
        at, _ = _name_of(link.connection)
        meeting = Group(world, device, _pair(link.address, port), _interface(at), _local_rank())
        own = folder / str(number)
        own.mkdir()
        mine[number] = Rank(rank, meeting, own, first, {**os.environ, **extra})
    elif what == "work":
        mine[number].send(rest[0])
    elif what == "where":
        link.connection.send(mine[number].where())
    else:
        one = mine.pop(number)
        one.kill()
        one.end()
        link.connection.send(True)


# How they meet


def _gathered(world: int) -> list[_Link]:
    """On rank 0: a link to each of the others."""
    with _quietly():
        store = _store(is_first=True, world=world)
    family, address = _address_here()
    _own_address[0] = address
    key, links = secrets.token_bytes(_KEY_BYTES), dict[int, _Link]()
    until = time.monotonic() + MEET_S
    with socket.create_server(("", 0), family=family, backlog=world) as server:
        store.set("rank 0", pickle.dumps((socket.gethostname(), address, server.getsockname()[1], key)))
        while len(links) + 1 < world:
            server.settimeout(max(0.01, until - time.monotonic()))
            try:
                link = _accepted(server, key)
            except TimeoutError:
                missing = ", ".join(str(r) for r in range(1, world) if r not in links)
                raise UsageError(
                    f"ranks that have not come to {_master()} within {MEET_S:g} s: {missing} of {world}; start torchrun on "
                    "every host with the same --nnodes and address"
                ) from None
            if link is not None:
                links[link.rank] = link
    return [links[rank] for rank in sorted(links)]


def _accepted(server: socket.socket, key: bytes) -> _Link | None:
    """The next one to come; None where it is a stranger, of whom nothing is read but a key."""
    peer, (address, *_) = server.accept()
    with peer:
        peer.settimeout(_END_S)
        with suppress(OSError):
            if hmac.compare_digest(peer.recv(_KEY_BYTES, socket.MSG_WAITALL), key):
                connection = _connection(peer)
                rank, host = connection.recv()
                return _Link(connection, rank, host, address)
    return None


def _linked(rank: int, world: int) -> _Link:
    """On another rank: its link to rank 0."""
    with _quietly():
        store = _store(is_first=False, world=world)
        host, address, port, key = pickle.loads(store.get("rank 0"))
        with socket.create_connection((address, port), timeout=MEET_S) as peer:
            peer.sendall(key)
            connection = _connection(peer)
    connection.send((rank, socket.gethostname()))
    return _Link(connection, 0, host, address)


def _connection(peer: socket.socket) -> Connection:
    """A connection over a copy of the socket, whose kernel notices a host that is gone."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _ASK_S),
        (socket.TCP_KEEPINTVL, _ASK_S),
        (socket.TCP_KEEPCNT, SILENT_S // _ASK_S - 1),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),  # of what was sent; keeping alive counts by it, too
        (socket.TCP_NODELAY, 1),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(peer.dup().detach())


def _store(*, is_first: bool, world: int) -> Any:
    """The store at MASTER_ADDR, which torchrun keeps, or rank 0 where another launcher has started the ranks."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address, port, world, is_first and not is_kept, timedelta(seconds=MEET_S), wait_for_workers=False
    )
    if is_first and not is_kept:
        _kept.append(store)
    return dist.PrefixStore(f"fp8-harness/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


_kept: list[object] = []  # the store of rank 0, until it ends


@contextmanager
def _quietly() -> Iterator[None]:
    """Whatever torch or the network raises here, in one line."""
    from torch.distributed import DistError

    why = ""
    with raw_output.captured():
        try:
            yield
        except (DistError, OSError) as error:
            why = str(error).splitlines()[0]
            raw_output.lines()  # of its attempts
    if why:
        raise UsageError(
            f"the ranks cannot meet at {_master()} ({why}); see that this host reaches that one, set another MASTER_PORT "
            "where it is in use, or start without torchrun: on one host the harness starts ranks=N itself and needs no port"
        )


def _address_here() -> tuple[socket.AddressFamily, str]:
    """The address of this host by which the others reach it: that of its network towards MASTER_ADDR."""
    name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, protocol, _, target = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return family, str(probe.getsockname()[0])


def _interface(address: str) -> str:
    """The name of the network interface that has an address."""
    for name, known in psutil.net_if_addrs().items():
        if address in (one.address for one in known):
            return name
    return "lo"


def _name_of(connection: Connection) -> tuple[str, int]:
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        address, port, *_ = own.getsockname()
        return str(address), int(port)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _pair(address: str, port: int) -> str:
    return f"{address}:{port}"


def _master() -> str:
    return _pair(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _gone(error: Exception) -> str:
    """What the end of a connection says of the other side."""
    if isinstance(error, OSError) and error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no sign of life from its host for {SILENT_S} s"
    return "its process has ended"
