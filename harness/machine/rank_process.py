"""The process of one rank: how it is started, what it is asked and what it answers (`harness.machine.ranks`)."""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import gc
import io
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.machine import fork_server
from harness.machine.processes import end_with_parent, kill_group
from harness.store.errors import OUT_OF_MEMORY, Cause, one_line, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

    from harness.machine.processes import Deadline


# What a rank sees of another one's end, by gloo, NCCL and the store
_OF_A_PEER = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|DistStore|store timed out", re.I
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[^/]*)/")


class RanksError(RuntimeError):
    """A rank raised, died or did not end in time; the message names it.

    Attributes:
        rank: the one at fault; None where it is unknown.
        words: of the rank at fault alone, without its number; the message where it is unknown.
        lost: the rank is gone with its process or its host, for all groups to come: no fault of what was run.
    """

    def __init__(
        self,
        message: str,
        rank: int | None,
        *,
        words: str = "",
        lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.words = words or message
        self.rank, self.lost = rank, lost
        # None: what was under way decides (`harness.store.errors.cause_of`)
        self.cause = Cause.DIED if lost else Cause.OOM if self.words.startswith(OUT_OF_MEMORY) else None


@dataclass(frozen=True, slots=True)
class Fault:
    """What became of one rank, by the clock that all processes of a machine share."""

    rank: int
    at: float
    text: str
    of_a_peer: bool = False  # it only saw that another one was gone
    host: str = ""  # where it is not this one
    lost: bool = False  # with the process that would start another one in its place


def raised(rank: int, error: BaseException) -> Fault:
    """A rank whose function raised."""
    text = f"{one_line(error)}\n{''.join(traceback.format_exception(error)).strip()}"
    of_a_peer = isinstance(error, RuntimeError) and bool(_OF_A_PEER.search(text_of(error)))
    return Fault(rank, time.monotonic(), text, of_a_peer)


def died(rank: int, code: int, words: str) -> Fault:
    """A rank that is gone without an answer; `words`: the end of what it wrote to stderr."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    said = words.strip()[-2000:]
    return Fault(rank, time.monotonic(), how + (f":\n{said}" if said else ""))


def error(faults: list[Fault], world: int) -> RanksError:
    """The error that names the rank at fault, with its own words; the others are its victims."""
    guilty = min(faults, key=lambda fault: (fault.of_a_peer, fault.at))
    where = f" ({guilty.host})" if guilty.host else ""
    return RanksError(
        f"rank {guilty.rank} of {world}{where}: {guilty.text}",
        guilty.rank,
        words=guilty.text,
        lost=guilty.lost,
    )


def late(stacks: Mapping[int, str], ended: set[int], world: int, timeout_s: float) -> RanksError:
    """The error of ranks that have not ended in time.

    Args:
        stacks: of each of them, what faulthandler wrote of its main thread.
        ended: the ranks that have.
        world: number of ranks.
        timeout_s: the time that they had.
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
    return RanksError(f"{at_fault}not all ended within {timeout_s:g} s: {'; '.join(lines)}", guilty)


def _stands(stack: str) -> tuple[str, str]:
    """Which collective a stack waits in ("" for none), and the place in a caller's own code."""
    frames = [match for line in stack.splitlines() if (match := _FRAME.match(line))]
    if not frames:
        return "", "gives no sign of life"
    own = next((i for i, frame in enumerate(frames) if not _LIBRARY.search(frame["file"])), len(frames) - 1)
    calls = [frame["name"] for frame in frames[:own] if "/torch/distributed/" in frame["file"]]
    named = next((name for name in reversed(calls) if name != "wrapper"), "")
    place = frames[own]
    return f"waits in {named}" if named else "", f"at {place['file']}:{place['line']} in {place['name']}"


# By name, so that nothing here imports what stands above; what optimizers import when first used is the slowest.
PRELOADED = ["torch", "torch._dynamo", "harness.training.parallel.cells"]
PASSED_ON = 4000  # characters of what a rank wrote to standard error during one call
SIGN_S = 0.5  # for a rank that has not ended to say where it stands


class Group(NamedTuple):
    """A process group, as one of its ranks is told of it.

    Attributes:
        world: ranks.
        device: as in `harness.machine.ranks.run`.
        store: where they meet: a file, or address:port|prefix of torch's store.
        interface: of the network, for gloo.
        gpu: the one of this rank.
    """

    world: int
    device: str
    store: str
    interface: str
    gpu: int


class Rank:
    """One process, seen from outside.

    Args:
        rank: its number.
        group: that it joins first of all.
        folder: for a file of its own.
        first: a function, pickled, whose module it imports before.
        env: its environment.

    Attributes:
        ours: there is an answer when it can be read.
    """

    def __init__(self, rank: int, group: Group, folder: Path, first: bytes, env: Mapping[str, str]) -> None:
        context = fork_server.context(PRELOADED)
        self.rank = rank
        self.said = folder / f"stderr-{rank}"
        self._passed_on = 0  # characters
        self.ours, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, rank, group, self.said, first, dict(env))
        )
        self.process.start()
        theirs.close()

    def send(self, work: bytes) -> None:
        """Gives it a call to make; that it is gone shows in its answer."""
        with suppress(OSError):
            self.ours.send_bytes(work)

    def message(self) -> bytes:
        """What it sends, packed: (True, result) or a `Fault`; the first result says that it is in the group."""
        try:
            return self.ours.recv_bytes()
        except (EOFError, OSError):
            self.process.join()
            return pack(died(self.rank, self.process.exitcode or 0, self._words()))

    def answer(self) -> Any:
        """(True, result) or a `Fault`."""
        return unpack(self.message(), self.rank)

    def where(self) -> str:
        """The stack of its main thread; "" where it gives no sign."""
        before = len(self._words())
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        ends = time.monotonic() + SIGN_S
        while time.monotonic() < ends and not self._words()[before:].endswith("\n"):
            time.sleep(0.01)
        return self._words()[before:]

    def news(self) -> str:
        """What it has written to standard error since the last time, its end where that is long."""
        words = self._words()
        new, self._passed_on = words[self._passed_on :][-PASSED_ON:], len(words)
        return new

    def pass_on(self) -> None:
        """Writes its news to standard error of this process."""
        write_news(self.rank, self.news())

    def _words(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""

    def kill(self) -> None:
        """Ends it and what it has started."""
        kill_group(self.process.pid or 0)
        self.process.kill()

    def end(self, until: Deadline) -> None:
        """Waits until it is gone."""
        self.process.join(until.left())
        self.ours.close()


def pack(answer: object) -> bytes:
    """What a rank answers, for `unpack`."""
    import torch

    file = io.BytesIO()
    torch.save(answer, file)
    return file.getvalue()


def unpack(message: bytes, rank: int) -> Any:
    """An answer of plain values, tensors, enums and data classes; a `Fault` where it has something else: that is not called."""
    from torch import load, serialization

    file = io.BytesIO(message)
    named = map(_imported, serialization.get_unsafe_globals_in_checkpoint(file))
    file.seek(0)
    try:
        with serialization.safe_globals([one for one in named if _is_data(one)]):
            return load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        return raised(rank, error)


def _imported(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(sys.modules.get(module), own, None)


def _is_data(found: Any) -> bool:
    return isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, tuple | frozenset | enum.Enum)
    )


def write_news(rank: int, news: str) -> None:
    """Writes what a rank has said to standard error of this process."""
    if news:
        text = "".join(f"rank {rank}: {line}\n" for line in news.splitlines())
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))


def _serve(
    parent: Connection, rank: int, group: Group, said: Path, first: bytes, env: dict[str, str]
) -> None:
    """The process of one rank: makes the calls that it is given, and stays until it is killed: others may need it."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the parent, and a kill reaches what this process starts
    end_with_parent()
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    gc.freeze()  # as a worker does: a step that collects is to look through its own objects only
    os.environ.clear()  # that of the server is of the time when it started
    os.environ.update(env)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", group.interface)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import set_debug_level_from_env

    torch.set_num_threads(1)
    set_debug_level_from_env()

    def meet() -> None:
        if first:
            pickle.loads(first)
        if group.device == "cuda":
            torch.cuda.set_device(group.gpu)
        backend = "cpu:gloo,cuda:nccl" if group.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=_store(), rank=rank, world_size=group.world)

    def _store() -> Any:
        import torch.distributed as dist

        if group.store.startswith("/"):
            return dist.FileStore(group.store, group.world)  # type: ignore[attr-defined]
        where, _, prefix = group.store.partition("|")
        address, _, port = where.rpartition(":")
        there = dist.TCPStore(address, int(port), is_master=False)  # type: ignore[attr-defined]
        return dist.PrefixStore(prefix, there)  # type: ignore[attr-defined]

    def called() -> Any:
        fn, args = pickle.loads(work)
        return fn(*args)

    call: Callable[[], Any] = meet
    while True:
        try:
            answer: Any = (True, call())
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises is told
            answer = raised(rank, error)
        try:
            message = pack(answer)
        except Exception as error:  # noqa: BLE001 - whatever an object raises that does not let itself be pickled
            message = pack(raised(rank, error))
        parent.send_bytes(message)
        try:
            work = parent.recv_bytes()
        except (EOFError, OSError):
            threading.Event().wait()  # until `end_with_parent` sees it
        call = called
