"""Links between the ranks of `harness.machine.torchrun`: how rank 0 and the others find one another, and how they notice an end.

The kernel asks for signs of life over each link: the end of a process is seen at once, a host that is cut off after `SILENT_S`.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import pickle
import secrets
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output
from harness.machine.rank_faults import Fault
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

MEET_S = 120.0  # for all of them to come
SILENT_S = 20  # without a sign of life of another host's kernel, after which that host is cut off
ASK_S = 5  # between two questions for one
END_S = 10.0  # for a process to end that was killed
_KEY_BYTES = 32
WAY = "start all ranks again, with resume=RUN where there is a run"


@dataclass(eq=False)
class Link:
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
            self.lost = Fault(self.rank, time.monotonic(), f"{gone(error)}; {WAY}", host=where, lost=True)
            return self.lost


def gathered(world: int) -> tuple[str, list[Link]]:
    """On rank 0: its address, and a link to each of the others, by rank."""
    with _quietly():
        store = _store(is_first=True, world=world)
    family, address = _address_here()
    key, links = secrets.token_bytes(_KEY_BYTES), dict[int, Link]()
    until = time.monotonic() + MEET_S
    with socket.create_server(("", 0), family=family, backlog=world) as server:
        # The name of this host may mean its loopback here, and this host elsewhere
        named = os.environ["MASTER_ADDR"] if is_loopback(address) else address
        store.set("rank 0", pickle.dumps((socket.gethostname(), named, server.getsockname()[1], key)))
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
    reached = [name_of(link.connection) for link in links.values() if not is_loopback(link.address)]
    return reached[0] if reached else address, [links[rank] for rank in sorted(links)]


def _accepted(server: socket.socket, key: bytes) -> Link | None:
    """The next one to come; None where it is a stranger, of whom nothing is read but a key."""
    peer, (address, *_) = server.accept()
    with peer:
        peer.settimeout(END_S)
        with suppress(OSError):
            if hmac.compare_digest(peer.recv(_KEY_BYTES, socket.MSG_WAITALL), key):
                connection = _connection(peer)
                rank, host = connection.recv()
                return Link(connection, rank, host, address)
    return None


def linked(rank: int, world: int) -> Link:
    """On another rank: its link to rank 0."""
    with _quietly():
        store = _store(is_first=False, world=world)
        host, address, port, key = pickle.loads(store.get("rank 0"))
        with socket.create_connection((address, port), timeout=MEET_S) as peer:
            peer.sendall(key)
            found, *_ = peer.getpeername()
            connection = _connection(peer)
    connection.send((rank, socket.gethostname()))
    return Link(connection, 0, host, str(found))


def _connection(peer: socket.socket) -> Connection:
    """A connection over a copy of the socket, whose kernel notices a host that is gone."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, ASK_S),
        (socket.TCP_KEEPINTVL, ASK_S),
        (socket.TCP_KEEPCNT, SILENT_S // ASK_S - 1),
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
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world, is_first and not is_kept, timedelta(seconds=MEET_S), wait_for_workers=False
    )
    if is_first and not is_kept:
        _kept.append(store)
    return dist.PrefixStore(f"fp8-harness/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]


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


def interface_of(address: str) -> str:
    """The name of the network interface that has an address."""
    import psutil

    for name, known in psutil.net_if_addrs().items():
        if address in (one.address for one in known):
            return name
    return "lo"


def name_of(connection: Connection) -> str:
    """The address at this end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        return str(own.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an address is of its own host alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def pair(address: str, port: int) -> str:
    """Both as one word."""
    return f"{address}:{port}"


def _master() -> str:
    return pair(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def gone(error: Exception) -> str:
    """What the end of a connection says of the other side."""
    if isinstance(error, OSError) and error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no sign of life from its host for {SILENT_S} s"
    return "its process has ended"
