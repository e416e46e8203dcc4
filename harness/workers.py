"""Workers: processes that do one job after the other for this one, and may die over it.

    with Pool([Conditions.here()], timeout_s=60) as pool:
        for ended in pool.run(jobs, on_sign): ...

A worker is warm and used again until it dies, reports nothing for too long, has leaked, or says that it is spoiled (a CUDA
fault poisons all that a process does later); then another takes its place. It is forked, in some ten milliseconds, from a
server that has imported torch and the suites, runs nothing and so holds no threads that a fork could lose.

Every job ends exactly once. One whose worker died is given to a second worker, since many deaths come from outside (the
kernel's memory killer, an operator); one that takes two workers with it has failed.

What a job prints never reaches the terminal nor the pipe that answers come by: standard output and error of a worker are
a second pipe, of which the last lines are kept for the reason of a failure.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.measurement import DIED
from harness.processes import (
    end_with_parent,
    ending,
    kill_group,
    limit_memory,
    memory_of_this_process,
)

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from types import TracebackType

PRELOADED = ["harness.tasks", "harness.suites"]  # nothing of it starts a thread; pyarrow would
TRIES = 2
LEAK_BYTES = (
    2**30
)  # of resident memory above what the first job of a process left: then another takes its place
START_S = 300.0  # for a worker to start; the server's first imports are within it
KEPT_BYTES = 4000  # of what a worker printed last

Tell = Callable[[int, int, str], None]  # a job's sign of life: steps done, of how many, and what it does next
Job = Callable[[Tell], tuple[Any, bool]]  # picklable; returns its result and whether its process is spoiled
OnSign = Callable[[Any, int, int], None]

# A suite is a module, which does not pickle; its name does.
ForkingPickler.register(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


class _Sign(NamedTuple):
    done: int
    total: int
    what: str


class _Answer(NamedTuple):
    result: Any
    spoiled: bool
    fault: str = ""


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


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    Attributes:
        job: which.
        worker: index of the conditions that it ran under.
        tries: workers that had it.
        result: what it returned.
        fault: why there is no result; "" where there is.
        died: whether the fault is the death of its worker, which may have come from outside.
        printed: the last lines that its worker printed, where there is a fault.
    """

    job: Any
    worker: int = 0
    tries: int = 1
    result: Any = None
    fault: str = ""
    died: bool = False
    printed: str = ""


def start_server() -> None:
    """Starts the server that workers are forked from, which then imports beside this process.

    Workers are forked whether or not this was called; the first is there the sooner.
    """
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class Pool:
    """Workers that share a queue of jobs; a context manager, which ends them.

    Args:
        conditions: a worker each.
        timeout_s: a job may go on for so long without a sign of life.
    """

    def __init__(self, conditions: Sequence[Conditions], timeout_s: float) -> None:
        self._workers = [_Worker(index, each, timeout_s) for index, each in enumerate(conditions)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, jobs: Iterable[Job], on_sign: OnSign = lambda job, done, total: None) -> Iterator[Ended]:
        """Does the jobs in order, as many at once as there are workers, and yields each as it ends.

        A worker gets its next job when the caller comes back for more: what the caller does with a result does not
        disturb what that worker measures next.

        Args:
            jobs: asked for one only when a worker is free.
            on_sign: told of every sign of life.
        """
        waiting = iter(jobs)
        for worker in self._workers:
            yield from _feed(worker, waiting)
        while busy := [worker for worker in self._workers if worker.job is not None]:
            ready = wait([s for w in busy for s in w.sources()], max(0.0, min(w.left_s() for w in busy)))
            for worker in busy:
                ended = worker.hear(ready, on_sign)
                if ended is not None:
                    yield ended
                    yield from _feed(worker, waiting)


def _feed(worker: _Worker, waiting: Iterator[Job]) -> Iterator[Ended]:
    """Gives a worker its next job; yields those that can't be given."""
    for job in waiting:
        refused = worker.take(job)
        if refused is None:
            return
        yield refused


class _Worker:
    """One place in the pool: a process, seen from outside, and the job that it has."""

    def __init__(self, index: int, conditions: Conditions, timeout_s: float) -> None:
        self.index, self._conditions, self._timeout_s = index, conditions, timeout_s
        self.job: Job | None = None
        self._tries = 0
        self._process: ForkServerProcess | None = None
        self._ours: Connection
        self._noise: Connection | None = None
        self._printed = b""
        self._what = ""
        self._deadline = 0.0

    def take(self, job: Job) -> Ended | None:
        """Starts on a job; None unless it can't be handed over."""
        self._tries = 0
        try:
            self._give(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            why = f"cannot be handed to a worker process ({error}); isolate=false does it in this one"
            return Ended(job, self.index, fault=why)
        return None

    def _give(self, job: Job) -> None:
        self._printed, self._what = b"", "it started"
        try:
            if self._process is None:
                self._start()
            self._ours.send(job)
        except OSError:  # it died while it had nothing to do
            self.end()
            self._start()
            with suppress(OSError):  # and again: the death is heard of as any other
                self._ours.send(job)
        self.job = job
        self._tries += 1
        self._deadline = time.monotonic() + START_S

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ours, theirs = context.Pipe()
        self._noise, noise = context.Pipe(duplex=False)
        os.set_blocking(self._noise.fileno(), False)
        # Not a daemon: a job may start processes of its own.
        process = context.Process(target=_serve, args=(theirs, noise, self._conditions), daemon=False)
        process.start()
        self._process = process
        theirs.close()
        noise.close()

    def sources(self) -> list[Any]:
        """What to wait for: an answer, something printed, the death of the process."""
        assert self._process is not None
        return [self._ours, self._process.sentinel, *([self._noise] if self._noise else [])]

    def left_s(self) -> float:
        """Until its silence has been too long."""
        return self._deadline - time.monotonic()

    def hear(self, ready: Sequence[Any], on_sign: OnSign) -> Ended | None:
        """Takes in what is there; how its job ended, if it has."""
        assert self._process is not None
        if self._noise in ready:
            self._listen()
        try:
            while self._ours.poll():
                message = self._ours.recv()
                if isinstance(message, _Answer):
                    return self._answered(message)
                self._what = message.what
                self._deadline = time.monotonic() + self._timeout_s
                on_sign(self.job, message.done, message.total)
        except (EOFError, OSError):
            return self._died()
        if self._process.sentinel in ready:
            return self._died()
        if self.left_s() <= 0:
            silence = f"no sign of life for {self._timeout_s:g} s since {self._what}; case_timeout_s=SECONDS allows more"
            return self._failed(silence)
        return None

    def _answered(self, answer: _Answer) -> Ended:
        if answer.fault:
            return self._failed(answer.fault)
        job, self.job = self.job, None
        if answer.spoiled:
            self.end()
        return Ended(job, self.index, self._tries, answer.result)

    def _died(self) -> Ended | None:
        assert self._process is not None
        self._process.join(5)
        how = ending(self._process.exitcode or 0)
        if self._tries < TRIES and self.job is not None:
            self.end()
            self._give(self.job)
            return None
        printed = self._last_lines()
        said = f": {printed.splitlines()[-1][:200]}" if printed else ""
        return self._failed(
            f"{DIED} {'twice ' if self._tries == TRIES else ''}({how}) after {self._what}{said}", died=True
        )

    def _failed(self, fault: str, *, died: bool = False) -> Ended:
        printed = self._last_lines()
        self.end()
        job, self.job = self.job, None
        return Ended(job, self.index, self._tries, fault=fault, died=died, printed=printed)

    def _listen(self) -> None:
        """Reads what was printed, and keeps the end of it."""
        assert self._noise is not None
        try:
            while piece := os.read(self._noise.fileno(), 1 << 16):
                self._printed = (self._printed + piece)[-KEPT_BYTES:]
                if len(piece) < 1 << 16:
                    return  # one that never stops printing must not keep this process from its other workers
        except BlockingIOError:
            return
        self._noise.close()  # the worker has closed its end
        self._noise = None

    def _last_lines(self) -> str:
        if self._noise is not None:
            self._listen()
        return self._printed.decode(errors="replace").strip()

    def end(self) -> None:
        """Ends the process, and whatever it has started."""
        if self._process is None:
            return
        if self._process.pid is not None:
            kill_group(self._process.pid)
        self._process.kill()
        self._process.join(10)  # one that hangs in the driver can't be waited for
        self._ours.close()
        if self._noise is not None:
            self._noise.close()
        self._process = self._noise = None


def _serve(parent: Connection, noise: Connection, conditions: Conditions) -> None:
    """The process of a worker: does jobs until its parent has no more, or is gone."""
    os.setpgrp()  # Ctrl-C reaches every process of the terminal's group; the parent decides what becomes of this one
    for asked in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a scheduler sends it to every process; a handler is not inherited
        signal.signal(asked, lambda *_: None)
    end_with_parent()
    for descriptor in (1, 2):
        os.dup2(noise.fileno(), descriptor)
    noise.close()
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

    def tell(done: int, total: int, what: str) -> None:
        parent.send(_Sign(done, total, what))

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
        answer = _Answer(result, spoiled or resident - settled > conditions.leak_bytes)
        try:
            parent.send(answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            parent.send(_Answer(None, False, f"its rows cannot be sent: {error}"))
