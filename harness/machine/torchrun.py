"""Torchrun: the processes that `torchrun` has started, on this host and on others, and how they reach each other.

    torchrun --nproc-per-node=2 -m harness sweep=allgather ranks=2

Rank 0 is the command: it plans, stores and reports. Every process, rank 0's too, computes in a process that it starts for each arm
(`harness.engine.far`), so that a fault ends the arm and not the command. Commands and answers are data in torch's own store at
MASTER_ADDR. Each rank sets a sign of life there; one without any for `SILENT_S` is lost, with what its host was to compute, until
all are started again.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEET_S = 120.0  # for all of them to come
SILENT_S = 20  # without a sign of life, after which a rank is lost
BEAT_S = 4.0  # between two of them
WAY = "start all ranks again, with resume=RUN where there is a run"
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


@dataclass(frozen=True, slots=True)
class Known:
    """What rank 0 knows of a rank.

    Attributes:
        host: its name.
        address: of its host, towards the first one.
    """

    host: str
    address: str


_ranks: list[Known] = []  # on rank 0, once all have met; none in any other process
lost: list[str] = []  # why no group can be formed any more
_beats = [time.monotonic()]  # when the store last answered
_kept: list[object] = []  # the store of rank 0, where torchrun keeps none
_numbers = itertools.count()  # of groups


def leads(world: int) -> bool:
    """Whether this process is rank 0 of so many, all of which have met."""
    return len(_ranks) == world > 1


def hosts(world: int) -> int:
    """On how many hosts a group of so many ranks computes."""
    return len(set(_ranks)) if leads(world) else 1


def shared(command: Callable[[], int], follow: Callable[[Any, int], int]) -> int:
    """The exit code of a command; of several ranks, the first one runs it and the others follow, each with the store and its number.

    Raises:
        UsageError: the ranks cannot meet; or this is another one than rank 0, which is gone.
    """
    world = started()
    if world < 2:
        return command()
    rank = int(os.environ["RANK"])
    with _errors_in_one_line(), raw_output.captured():
        store = client(first=rank == 0)
        store.set(f"here/{rank}", json.dumps([socket.gethostname(), _address_here()]))
        raw_output.lines()  # of its attempts
        threading.Thread(target=_beat, args=(client(), rank), daemon=True).start()
    if rank:
        _beats[0] = time.monotonic()
        threading.Thread(target=_end_when_cut_off, args=(rank,), daemon=True).start()
        with _errors_in_one_line():
            store.wait(["alive/0"], timedelta(seconds=MEET_S))
            return follow(store, rank)
    try:
        store.wait([f"here/{r}" for r in range(world)], timedelta(seconds=MEET_S))
        _ranks[:] = [Known(*json.loads(store.get(f"here/{r}"))) for r in range(world)]
    except RuntimeError:
        missing = [str(r) for r in range(world) if not store.check([f"here/{r}"])]
        raise UsageError(
            f"ranks that have not come to {_master()} within {MEET_S:g} s: {', '.join(missing)} of {world}; start torchrun "
            "on every host with the same --nnodes and address"
        ) from None
    try:
        return command()
    finally:
        _ranks.clear()
        with suppress(RuntimeError):  # the store is gone: so are they
            for other in range(1, world):
                send(store, other, do="leave", number=0)


def meeting() -> str:
    """Where the ranks of one more group meet."""
    return f"{_master()}|{_prefix()}/group/{next(_numbers)}"


def host_of(rank: int) -> str:
    """Which host a rank is on; for rank 0."""
    hosts = list(dict.fromkeys(_ranks))  # a row may name no host
    return f"host {hosts.index(_ranks[rank]) + 1} of {len(hosts)}"


def send(store: Any, rank: int, **message: Any) -> None:
    """Says something to a rank, after all that was said before."""
    number = store.add(f"to/{rank}", 1)
    store.set(f"to/{rank}/{number}", json.dumps(message))


def _beat(store: Any, rank: int) -> None:
    """Signs of life, each of which the store answers."""
    with suppress(RuntimeError):
        while True:
            store.add(f"alive/{rank}", 1)
            _beats[0] = time.monotonic()
            time.sleep(BEAT_S)


def _end_when_cut_off(rank: int) -> None:
    """End this process, and with it the ranks that it has started, once the store has not answered: a client would wait on."""
    while time.monotonic() - _beats[0] < 2 * SILENT_S:
        time.sleep(1.0)
    raw_output.notify(f"error: rank {rank}: no sign of life from {_master()} for {2 * SILENT_S} s; {WAY}\n")
    os._exit(1)


def patiently(store: Any, key: str, other: int) -> bytes:
    """What a rank sets, once it has.

    Raises:
        ConnectionError: it gives no sign of life.
    """
    alive, silent = f"alive/{other}", timedelta(seconds=SILENT_S)
    while True:
        beat = store.get(alive)
        try:
            store.wait([key], silent)
        except RuntimeError:
            if store.get(alive) == beat:
                raise ConnectionError(f"no sign of life from its host for {SILENT_S} s") from None
            continue
        found = store.get(key)
        store.delete_key(key)
        return bytes(found)


def client(first: bool = False) -> Any:
    """A client of the store at MASTER_ADDR, which torchrun keeps, or rank 0 where another launcher has started the ranks."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_it = first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, started(), hosts_it, timedelta(seconds=MEET_S), wait_for_workers=False
    )
    _kept.extend([store] * hosts_it)
    return dist.PrefixStore(_prefix(), store)  # type: ignore[attr-defined]


def _prefix() -> str:
    return f"fp8-harness/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Whatever torch or the network raises here, in one line."""
    from torch.distributed import DistError

    try:
        yield
    except (DistError, OSError) as fault:
        raise UsageError(
            f"rank {os.environ['RANK']} cannot meet the others at {_master()}, or has lost them ({str(fault).splitlines()[0]}); see "
            f"that this host reaches that one, set another MASTER_PORT where it is in use, and {WAY}; on one host the harness starts "
            "ranks=N itself, without torchrun"
        ) from fault


def _address_here() -> str:
    """The address of this host by which the others reach it: that of its network towards MASTER_ADDR."""
    name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, protocol, _, target = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def interface(several: int) -> str:
    """The network interface by which the ranks of so many hosts are reached; of one, this host's own."""
    import psutil

    if several == 1:
        return "lo"
    others = [known.address for known in dict.fromkeys(_ranks)][1:]
    towards = others[0] if others else _address_here()
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        own = probe.getsockname()[0]
    if own == towards and _is_loopback(own):
        return "lo"
    known = psutil.net_if_addrs().items()
    return next((name for name, found in known if own in (one.address for one in found)), "lo")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def local_rank() -> int:
    """Number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _master() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
