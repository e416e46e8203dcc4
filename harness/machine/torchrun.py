"""Torchrun: the processes that `torchrun` has started, on this host and on others, as ranks of `harness.machine.ranks`.

    torchrun --nproc-per-node=2 -m harness sweep=allgather ranks=2

Rank 0 is the command: it plans, stores and reports. Every process, rank 0's too, computes in a process that it starts for one
group of ranks, so that a fault ends the group and not the command. Commands and answers go through torch's own store at
MASTER_ADDR, as the ranks' rendezvous does: whoever can reach its port can run code as this user. Each rank sets a sign of life
there; one without any for `SILENT_S` is lost, with what its host was to compute, until all are started again.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import pickle
import socket
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output
from harness.machine.rank_process import SIGN_S, Fault, Group, Rank, error, unpack, write_news
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection

    from harness.machine.processes import Deadline

MEET_S = 120.0  # for all of them to come
END_S = 15.0  # for an answer to what needs no work
JOIN_S = 1.0  # for a thread that has its answer
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
_lost: list[Fault] = []  # ranks that gave no answer
_beats = [time.monotonic()]  # when the store last answered
_kept: list[object] = []  # the store of rank 0, where torchrun keeps none
_numbers = itertools.count()  # of groups


def leads(world: int) -> bool:
    """Whether this process is rank 0 of so many, all of which have met."""
    return len(_ranks) == world > 1


def hosts(world: int) -> int:
    """On how many hosts a group of so many ranks computes."""
    return len(set(_ranks)) if leads(world) else 1


def shared(command: Callable[[], int]) -> int:
    """The exit code of a command; of several ranks, the first one runs it and the others help.

    Raises:
        UsageError: the ranks cannot meet; or this is another one than rank 0, which is gone.
    """
    world = started()
    if world < 2:
        return command()
    rank = int(os.environ["RANK"])
    with _told(), raw_output.captured():
        store = _client(first=rank == 0)
        store.set(f"here/{rank}", json.dumps([socket.gethostname(), _address_here()]))
        raw_output.lines()  # of its attempts
        threading.Thread(target=_beat, args=(_client(), rank), daemon=True).start()
    if rank:
        _beats[0] = time.monotonic()
        threading.Thread(target=_end_when_cut_off, args=(rank,), daemon=True).start()
        with _told():
            store.wait(["alive/0"], timedelta(seconds=MEET_S))
            return _follow(store, rank)
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
                FarRank(other, "", store).tell("leave")


def group(
    world: int, device: str, folder: Path, first: bytes, env: Mapping[str, str]
) -> list[Rank | FarRank]:
    """On rank 0: a process in each of the ranks, which join one group.

    Raises:
        RanksError: a rank is lost since an earlier group.
    """
    if _lost:
        raise error(_lost, world)
    number = next(_numbers)
    meeting = f"{_master()}|{_prefix()}/group/{number}"
    places = list(dict.fromkeys(_ranks))  # a row may name no host
    others = [
        FarRank(rank, f"host {places.index(known) + 1} of {len(places)}")
        for rank, known in enumerate(_ranks)
        if rank
    ]
    far = [known.address for known in places[1:]]
    own = Group(world, device, meeting, _interface(far[0] if far else ""), _local_rank())
    extra = {name: value for name, value in env.items() if os.environ.get(name) != value}
    for other in others:
        other.start(number, world, device, meeting, bool(far), first, extra)
    return [Rank(0, own, folder, first, env), *others]


class FarRank:
    """A rank of another process than this one's children; as `harness.machine.rank_process.Rank`.

    Args:
        rank: its number.
        host: which one.
        store: to tell it by; None: one of its own, whose answers it waits for.
    """

    def __init__(self, rank: int, host: str, store: Any = None) -> None:
        self.rank, self._host, self._news, self._number = rank, host, "", -1
        self.heard = 0  # answers
        self._store = _client() if store is None else store
        self.ours, self._heard = Pipe(duplex=False)
        self.why = ""  # it will answer no more

    def tell(self, *message: Any) -> None:
        """Says something, after all that was said before."""
        number = self._store.add(f"to/{self.rank}", 1)
        self._store.set(f"to/{self.rank}/{number}", pickle.dumps(message))

    def start(self, number: int, *about: Any) -> None:
        """Has it start its process of a group, and listens to its answers from then on."""
        self._number = number
        self.tell("start", number, *about)
        self._key = f"from/{self.rank}/{number}"
        self._listener = threading.Thread(target=_listen, args=(self, self._key, self._heard), daemon=True)
        self._listener.start()

    def send(self, work: bytes) -> None:
        """Gives it a call to make."""
        self.tell("work", self._number, work)

    def answer(self) -> Any:
        """What it sends: (True, result) or a `Fault`."""
        try:
            news, _, message = self.ours.recv_bytes().partition(b"\n")
        except (EOFError, OSError):
            return self.silent(self.why)
        self._news, answer = json.loads(news), unpack(message, self.rank)
        if isinstance(answer, Fault):  # by the clock of this machine
            return replace(answer, at=time.monotonic(), host=self._host)
        return answer

    def silent(self, why: str) -> Fault:
        fault = Fault(self.rank, time.monotonic(), f"{why}; {WAY}", host=self._host, lost=True)
        _lost.append(fault)
        return fault

    def where(self) -> str:
        """The stack of its main thread; "" where it gives no sign."""
        return str(self._asked("where", SIGN_S + END_S) or "")

    def pass_on(self) -> None:
        """Writes what came with its answer to standard error of this process."""
        write_news(self.rank, self._news)
        self._news = ""

    def kill(self) -> None:
        """Ends its process of this group."""
        with suppress(RuntimeError):  # the store is gone: so is the rank
            self.tell("end", self._number)

    def end(self, until: Deadline) -> None:
        """Waits until that is gone."""
        if not until.left():
            with suppress(RuntimeError):
                for number in (
                    self.heard,
                    self.heard + 1,
                ):  # the next one, and the one after an answer just now
                    self._store.set(f"{self._key}/{number}", b"")
        elif self._reply("end", until.left()) is None:
            self.silent("gave no answer")
            return
        # One that waits in the store as the interpreter exits would abort it
        self._listener.join(max(until.left(), JOIN_S))

    def _asked(self, what: str, seconds: float) -> Any:
        self.tell(what, self._number)
        return self._reply(what, seconds)

    def _reply(self, what: str, seconds: float) -> Any:
        key = f"{what}/{self.rank}/{self._number}"
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return json.loads(self._store.get(key))


def _listen(far: FarRank, key: str, heard: Connection) -> None:
    """Hands on the answers of a rank, by a client of its own: a client that waits does nothing else."""
    try:
        store = _client()
        while answer := _patiently(store, f"{key}/{far.heard}", far.rank):
            far.heard += 1
            heard.send_bytes(answer)
    except (RuntimeError, OSError) as fault:  # the store is gone, or nobody listens any more
        far.why = str(fault).splitlines()[0]
    heard.close()


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
    raw_output.say(f"error: rank {rank}: no sign of life from {_master()} for {2 * SILENT_S} s; {WAY}\n")
    os._exit(1)


def _patiently(store: Any, key: str, other: int) -> bytes:
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


def _follow(store: Any, rank: int) -> int:
    """Does what rank 0 asks for, until it lets this process go."""
    mine: dict[int, tuple[Rank, threading.Thread]] = {}  # by the number of their group
    with tempfile.TemporaryDirectory() as folder:
        try:
            for count in itertools.count(1):
                what, *rest = pickle.loads(_patiently(store, f"to/{rank}/{count}", 0))
                if what == "leave":
                    return 0
                number = rest[0]
                if what == "start":
                    _, world, device, meeting, far, first, extra = rest
                    own = Path(folder) / str(number)
                    own.mkdir()
                    interface = _interface(_address_here() if far else "")
                    here = Group(world, device, meeting, interface, _local_rank())
                    one = Rank(rank, here, own, first, {**os.environ, **extra})
                    words = (one, f"from/{rank}/{number}")
                    mine[number] = one, threading.Thread(target=_tell_answers, args=words, daemon=True)
                    mine[number][1].start()
                elif what == "work":
                    mine[number][0].send(rest[1])
                elif what == "where":
                    store.set(f"where/{rank}/{number}", json.dumps(mine[number][0].where()))
                else:
                    one, thread = mine.pop(number)
                    one.kill()
                    thread.join(END_S)
                    store.set(f"end/{rank}/{number}", json.dumps(True))
        finally:
            for one, _ in mine.values():
                one.kill()
    raise AssertionError("a count ends")


def _tell_answers(one: Rank, key: str) -> None:
    """Hands the answers of this rank's process to rank 0, until it has ended."""
    store = _client()
    with suppress(RuntimeError):
        for number in itertools.count():
            message = one.message()  # not read here, where what it is made of may be unknown
            store.set(f"{key}/{number}", json.dumps(one.news()).encode() + b"\n" + message)
            if one.process.exitcode is not None:
                store.set(f"{key}/{number + 1}", b"")
                break
    one.ours.close()


def _client(first: bool = False) -> Any:
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
def _told() -> Iterator[None]:
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


def _interface(towards: str) -> str:
    """The network interface by which another address is reached; that of this host alone where there is none."""
    import psutil

    if not towards:
        return "lo"
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


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _master() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
