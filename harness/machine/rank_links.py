"""Links between the ranks of `harness.machine.torchrun`: how rank 0 and the others find one another, and how they notice an end.

The kernel asks for signs of life over each link: the end of a process is seen at once, a host that is cut off after `SILENT_S`.

Links carry pickles, which run code. Before the first one both ends prove by HMAC that they have the same `SECRET`; nothing else
that comes from the network or the store is unpickled here. Without a secret nothing is proved: then, as with torch's own
rendezvous, whoever can reach the port can run code as this user. Links are not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
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
from harness.store.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MEET_S = 120.0  # for all of them to come
SILENT_S = 20  # without a sign of life of another host's kernel, after which that host is cut off
ASK_S = 5  # between two questions for one
END_S = 10.0  # for a process to end that was killed
HELLO_S, HELLO_BYTES = 5.0, 4096  # for one that has come to say who it is
SECRET = "FP8_HARNESS_SECRET"  # environment variable, the same on all hosts
_NO_HELLO = (
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)  # of words that are none; the last of nested JSON
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
    links: dict[int, Link] = {}
    until = time.monotonic() + MEET_S
    bound, named, family = _where_to_listen(address, family, world)
    with socket.create_server((bound, 0), family=family, backlog=world) as server:
        here = {"host": socket.gethostname(), "address": named, "port": server.getsockname()[1]}
        store.set("rank 0", json.dumps(here))
        while len(links) + 1 < world:
            left = until - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError("it said nothing in time")
                server.settimeout(left)
                link = _accepted(server, links, world, until)
            except TimeoutError:
                missing = ", ".join(str(r) for r in range(1, world) if r not in links)
                raise UsageError(
                    f"ranks that have not come to {_master()} within {MEET_S:g} s: {missing} of {world}; start torchrun on "
                    f"every host with the same --nnodes and address, and the same {SECRET} if it is set"
                ) from None
            if link is not None:
                links[link.rank] = link
    reached = [name_of(link.connection) for link in links.values() if not is_loopback(link.address)]
    return reached[0] if reached else address, [links[rank] for rank in sorted(links)]


def _where_to_listen(
    address: str, family: socket.AddressFamily, world: int
) -> tuple[str, str, socket.AddressFamily]:
    """The address to listen at, the one to give to the others, and their family."""
    master = os.environ["MASTER_ADDR"]
    local = os.environ.get("LOCAL_WORLD_SIZE") == str(world) or master == "localhost" or _is_own(master)
    if local:
        return "127.0.0.1", "127.0.0.1", socket.AF_INET
    # The name of this host may mean its loopback here, and this host elsewhere
    return ("", master, family) if is_loopback(address) else (address, address, family)


def _is_own(text: str) -> bool:
    """Whether it is a number that means its own host alone."""
    with suppress(ValueError):
        return is_loopback(text)
    return False


def _accepted(server: socket.socket, links: Mapping[int, Link], world: int, until: float) -> Link | None:
    """The next one to come; None where it is a stranger. Nothing of it is unpickled before it has proved the secret."""
    peer, (address, *_) = server.accept()
    with peer, suppress(OSError, EOFError, *_NO_HELLO):
        until = min(until, time.monotonic() + HELLO_S)
        nonce = secrets.token_hex(16)
        _say(peer, {"nonce": nonce}, until)
        said = _heard(peer, until)
        why = _refusal(said, nonce, links, world)
        if why:
            _say(peer, {"refused": why}, until)
            return None
        _say(peer, {"proof": _proof("rank 0", nonce, said["hello"])}, until)
        hello = json.loads(said["hello"])
        return Link(_connection(peer), int(hello["rank"]), str(hello["host"]), address)
    return None


def _refusal(said: Mapping[str, Any], nonce: str, links: Mapping[int, Link], world: int) -> str:
    """Why one that has come is not taken; "" where it is."""
    if not hmac.compare_digest(str(said["proof"]), _proof("rank", nonce, said["hello"])):
        return f"it has another {SECRET} than rank 0"
    hello = json.loads(said["hello"])
    for name, mine in {"world": world, "job": _job()}.items():
        if hello[name] != mine:
            return f"it is of a job with {name} {hello[name]}, rank 0 of one with {mine}"
    if not isinstance(hello["rank"], int) or not 0 < hello["rank"] < world or hello["rank"] in links:
        return f"rank {hello['rank']} of {world} is there already, or cannot be"
    return ""


def linked(rank: int, world: int) -> Link:
    """On another rank: its link to rank 0."""
    hello = json.dumps(
        {
            "rank": rank,
            "world": world,
            "job": _job(),
            "host": socket.gethostname(),
            "nonce": secrets.token_hex(16),
        }
    )
    until, refused = time.monotonic() + MEET_S, ""
    with _quietly():
        store = _store(is_first=False, world=world)
        try:
            here = json.loads(store.get("rank 0"))
            host, address, port = str(here["host"]), str(here["address"]), int(here["port"])
            with socket.create_connection((address, port), timeout=MEET_S) as peer:
                nonce = str(_heard(peer, until)["nonce"])
                _say(peer, {"hello": hello, "proof": _proof("rank", nonce, hello)}, until)
                said = _heard(peer, until)
                if "refused" in said:
                    refused = str(said["refused"])
                elif not hmac.compare_digest(str(said["proof"]), _proof("rank 0", nonce, hello)):
                    refused = f"who answers there has another {SECRET}, or is not rank 0"
                found, *_ = peer.getpeername()
                connection = _connection(peer)
        except (EOFError, *_NO_HELLO) as error:
            raise OSError(f"what answers there is not rank 0 of this version: {one_line(error)}") from error
    if refused:
        connection.close()
        raise UsageError(
            f"rank {rank} of {world}: rank 0 at {pair(address, port)} did not take it: {refused}; give all hosts the same command, "
            f"MASTER_PORT and {SECRET}"
        )
    return Link(connection, 0, host, str(found))


def _job() -> str:
    """Names the job of these ranks, so that one that has come to another's port is noticed."""
    return os.environ.get("TORCHELASTIC_RUN_ID") or os.environ["MASTER_PORT"]


def _proof(who: str, nonce: str, hello: str) -> str:
    """HMAC-SHA256 of what both have said, with the secret; without one anybody can make it."""
    key = os.environ.get(SECRET, "").encode()
    return hmac.digest(key, f"{who}\0{nonce}\0{hello}".encode(), "sha256").hex()


def _say(peer: socket.socket, words: Mapping[str, str], until: float) -> None:
    peer.settimeout(max(0.01, until - time.monotonic()))
    text = json.dumps(words).encode()
    peer.sendall(len(text).to_bytes(4, "big") + text)


def _heard(peer: socket.socket, until: float) -> dict[str, Any]:
    """What the other one says; an error where it is too long or too late."""
    size = int.from_bytes(_read(peer, 4, until), "big")
    if size > HELLO_BYTES:
        raise ValueError(f"{size} bytes")
    said = json.loads(_read(peer, size, until))
    return dict(said)


def _read(peer: socket.socket, size: int, until: float) -> bytes:
    found = b""
    while len(found) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it said nothing in time")
        peer.settimeout(left)
        more = peer.recv(size - len(found))
        if not more:
            raise EOFError("it has hung up")
        found += more
    return found


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
