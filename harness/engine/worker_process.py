"""The process of a worker (`harness.engine.workers`): what it is given, does and says.

What a job prints never reaches the terminal nor the pipe that answers come by: standard output and error are a second pipe.
Which arm of a job is under way stands in memory that both sides share. Writing it wakes nobody, so that it may be done
before every timed block, and it is there to be read when the process is not.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from harness.machine.processes import ENDING_SIGNALS, end_with_parent, limit_memory, memory_of_this_process
from harness.store.errors import one_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from harness.engine.stages import Stage
    from harness.store.cause import Cause

LEAK_BYTES = (
    2**30
)  # of resident memory above what the first job of a process left: then another takes its place
_ARM_BYTES = 256  # a longer name is cut off, and then is that of no arm

# A suite is a module, which does not pickle; its name does.
ForkingPickler.register(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


def wire(what: object) -> bytes:
    """An object as another process can be sent it, suites included."""
    return bytes(ForkingPickler.dumps(what))


class Reporter(Protocol):
    """What a job tells of itself."""

    def __call__(self, done: int, total: int, what: str) -> None:
        """Heartbeat: steps done, their total, and the last thing that it did or started."""
        ...

    def set_arm(self, arm: str) -> None:
        """Which of its arms is under way from now on, whose a fault then is; "" for none. Costs less than 1 us."""
        ...

    def stage(self, stage: Stage) -> None:
        """What it does from now on, for people who wait: no heartbeat."""
        ...

    def keep(self, result: Any) -> None:
        """Hands over what there is of its result so far; returns when the parent has it safe."""
        ...


Job = Callable[
    [Reporter], tuple[Any, bool]
]  # picklable; returns its result and whether its process is spoiled


@runtime_checkable
class Splittable(Protocol):
    """A job of several arms, which can be done without the one that ended its process."""

    def drop_arm(self, arm: str, fault: str, printed: str, cause: Cause) -> Job | None:
        """The rest of the job, which keeps what is known of the fault; None where nothing would be left."""
        ...


@runtime_checkable
class Mendable(Protocol):
    """A job whose result may hold parts that cannot be sent."""

    def made_sendable(self, result: Any) -> Any:
        """The result with those parts replaced."""
        ...


@dataclass(frozen=True, slots=True)
class Resubmit:
    """The result of a job that is not at its end: another process has to do this one in its place."""

    job: Job


class Sign(NamedTuple):
    """A message of a job under way, see `Reporter`."""

    done: int
    total: int
    what: str


class Partial(NamedTuple):
    """A message of a job under way: its result so far, see `Reporter.keep`. The parent answers it."""

    result: Any


class Answer(NamedTuple):
    """The message that ends a job: its result, or why there is none."""

    result: Any
    spoiled: bool
    fault: str = ""


class ArmUnderWay:
    """The name of an arm, in memory that a worker shares with its parent."""

    def __init__(self) -> None:
        self._name = RawArray(ctypes.c_char, _ARM_BYTES)

    def write(self, arm: str) -> None:
        self._name.value = arm.encode()[: _ARM_BYTES - 1]

    def read(self) -> str:
        """The name; one that its writer died over is no arm's, as one that was cut off."""
        return str(self._name.value.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the process of a worker takes over from this one, whenever it is started.

    Attributes:
        environ: the environment variables.
        folder: the working folder.
        threads: of torch.
        memory_bytes: that it may ask for beyond what it starts with; None: no limit.
        leak_bytes: of resident memory above what its first job left, after which another process takes its place.
    """

    environ: Mapping[str, str]
    folder: str
    threads: int
    memory_bytes: int | None = None
    leak_bytes: int = LEAK_BYTES

    @classmethod
    def here(cls, memory_bytes: int | None = None, variables: Mapping[str, str] | None = None) -> Conditions:
        """Those of this process; `variables` are added to its environment."""
        import torch

        return cls(
            {**os.environ, **(variables or {})}, str(Path.cwd()), torch.get_num_threads(), memory_bytes
        )


class _PipeReporter:
    """A job's `Reporter`."""

    def __init__(self, parent: Connection, arm: ArmUnderWay) -> None:
        self._parent, self.set_arm = parent, arm.write

    def __call__(self, done: int, total: int, what: str) -> None:
        self._parent.send(Sign(done, total, what))

    def stage(self, stage: Stage) -> None:
        self._parent.send(stage)

    def keep(self, result: Any) -> None:
        self._parent.send(Partial(result))
        self._parent.recv()  # nothing else comes while a job is under way; a parent that is gone ends this process


def serve(parent: Connection, output_pipe: Connection, arm: ArmUnderWay, conditions: Conditions) -> None:
    """The process of a worker: does jobs until its parent has no more, or is gone."""
    os.setpgrp()  # Ctrl-C reaches every process of the terminal's group; the parent decides what becomes of this one
    for number in ENDING_SIGNALS:  # a scheduler sends it to every process; a handler is not inherited
        signal.signal(number, lambda *_: None)
    end_with_parent()
    for descriptor in (1, 2):
        os.dup2(output_pipe.fileno(), descriptor)
    output_pipe.close()
    faulthandler.enable()
    gc.freeze()  # what the server made is never garbage; looking through it would copy its pages
    os.environ.clear()
    os.environ.update(conditions.environ)
    os.chdir(conditions.folder)
    if conditions.memory_bytes is not None:
        limit_memory(conditions.memory_bytes)
    import torch

    torch.set_num_threads(conditions.threads)
    settled = 0  # resident memory after the first job
    tell = _PipeReporter(parent, arm)
    while True:
        try:
            job: Job = parent.recv()
        except (EOFError, OSError):
            return
        tell(0, 0, "its start")
        result, spoiled = job(tell)
        sys.stdout.flush()
        resident = memory_of_this_process("VmRSS")
        settled = settled or resident
        answer = Answer(result, spoiled or resident - settled > conditions.leak_bytes)
        try:
            parent.send(answer)
        except Exception as error:  # noqa: BLE001 - whatever an object raises that does not let itself be pickled
            parent.send(_sendable(job, answer, error))


def _sendable(job: Job, answer: Answer, error: Exception) -> Answer:
    """An answer that can be sent, in place of one whose sending has raised `error`."""
    if isinstance(job, Mendable):
        with suppress(Exception):
            mended = answer._replace(result=job.made_sendable(answer.result))
            wire(mended)
            return mended
    return Answer(None, False, f"its rows cannot be sent: {one_line(error)}")
