"""Workers: processes that do one job after the other for this one, and may die over it.

    with Pool([Conditions.here()], timeout_s=60) as pool:
        for ended in pool.run(jobs, on_sign): ...

A worker is warm and used again until it dies, reports nothing for too long, has leaked, or says that it is spoiled (a CUDA
fault poisons all that a process does later); then another takes its place. It is forked, in some ten milliseconds, from a
server that has imported torch and the suites, runs nothing and so holds no threads that a fork could lose.

Every job ends exactly once. One whose worker died is given to a second worker, since many deaths come from outside (the
kernel's memory killer, an operator); with the second death it has failed. If it has arms and was at one of them
(`worker_process.Splittable`), that arm has failed, and the rest of the job is done without it, all of it anew, in another
worker. So has an arm that was silent for too long, or spoiled its process. A job of n arms thus takes 1 + n workers at most.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.engine.printed import Printed
from harness.engine.stages import Stage
from harness.engine.worker_process import (
    Answer,
    ArmUnderWay,
    Conditions,
    Job,
    Partial,
    Reporter,
    Resubmit,
    Sign,
    Splittable,
    serve,
)
from harness.machine.processes import MARK, descendants, ending, kill_each, kill_group, kill_marked
from harness.store.cause import Cause
from harness.store.errors import one_line

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from types import TracebackType

__all__ = ["Conditions", "Ended", "Job", "Pool", "Reporter", "Resubmit", "start_server"]

PRELOADED = ["harness.engine.tasks"]  # nothing of it starts a thread; pyarrow would
START_S = 300.0  # for a worker to start; the server's first imports are within it
MESSAGE_S = 60.0  # for the rest of a message that has begun

OnSign = Callable[[Any, int, int], None]
OnPartial = Callable[[Any, int, Any], None]
OnStage = Callable[[Any, Stage], None]
OnPrinted = Callable[[Any, list[str]], None]


class _UnreadableError(Exception):
    """A worker sent something that is no message."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    Attributes:
        job: which; what is left of it, where it was done without some of its arms.
        worker: index of the conditions that it ran under.
        tries: workers that had it.
        result: what it returned.
        fault: why there is no result; "" where there is.
        cause: of the fault.
        printed: the last lines that its worker printed, where there is a fault.
    """

    job: Any
    worker: int = 0
    tries: int = 1
    result: Any = None
    fault: str = ""
    cause: Cause = Cause.NONE
    printed: str = ""

    @property
    def died(self) -> bool:
        """Whether the fault is the death of its worker, which may have come from outside."""
        return self.cause is Cause.DIED


def start_server(suites: Iterable[object] = ()) -> None:
    """Start the server that workers are forked from; it imports what they need while this process continues.

    Workers are forked whether or not this was called; the first is there the sooner.

    Args:
        suites: those of the plan. Modules are imported by the server, once for all workers.
    """
    from multiprocessing import forkserver

    modules = sorted({suite.__name__ for suite in suites if isinstance(suite, ModuleType)})
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *modules])
    forkserver.ensure_running()


class Pool:
    """Workers that share a queue of jobs; a context manager, which ends them.

    Args:
        conditions: a worker each.
        timeout_s: a job may run for so long without a heartbeat.
        wall_s: a worker may have it for so long, even with heartbeats.
        on_printed: given job and lines that its worker printed.
    """

    def __init__(
        self,
        conditions: Sequence[Conditions],
        timeout_s: float,
        wall_s: float = math.inf,
        on_printed: OnPrinted = lambda job, lines: None,
    ) -> None:
        self._workers = [
            _Worker(index, each, timeout_s, wall_s, on_printed) for index, each in enumerate(conditions)
        ]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # whatever the end of one raises, the others end too
            for worker in self._workers:
                stack.callback(worker.end)

    def run(
        self,
        jobs: Iterable[Job],
        on_sign: OnSign = lambda job, done, total: None,
        on_partial: OnPartial = lambda job, worker, result: None,
        on_stage: OnStage = lambda job, stage: None,
    ) -> Iterator[Ended]:
        """Does the jobs in order, as many at once as there are workers, and yields each as it ends.

        A worker gets its next job when the caller comes back for more: what the caller does with a result does not
        disturb what that worker measures next.

        Args:
            jobs: asked for one only when a worker is free.
            on_sign: called with every heartbeat.
            on_partial: given job, index of the worker and its result so far; the worker waits until it returns.
            on_stage: called at the start of each stage that a job tells.
        """
        waiting = iter(jobs)
        for worker in self._workers:
            yield from _feed(worker, waiting)
        while busy := [worker for worker in self._workers if worker.job is not None]:
            ready = wait(
                [s for w in busy for s in w.sources()], max(0.0, min(w.seconds_left() for w in busy))
            )
            for worker in busy:
                ended = worker.poll(ready, on_sign, on_partial, on_stage)
                if ended is not None:
                    yield ended
                    yield from _feed(worker, waiting)


def _feed(worker: _Worker, waiting: Iterator[Job]) -> Iterator[Ended]:
    """Gives a worker its next job; yields those that can't be given."""
    for job in waiting:
        refused = worker.submit(job)
        if refused is None:
            return
        yield refused


class _Worker:
    """One place in the pool: a process, seen from outside, and the job that it has."""

    def __init__(
        self, index: int, conditions: Conditions, timeout_s: float, wall_s: float, on_printed: OnPrinted
    ) -> None:
        self.index, self._conditions = index, conditions
        self._timeout_s, self._wall_s = timeout_s, wall_s
        self.job: Job | None = None
        self._tries = self._deaths = 0
        self._process: ForkServerProcess | None = None
        self._ours: Connection
        self._printed: Printed | None = None
        self._on_printed = on_printed
        self._arm = ArmUnderWay()
        self._mark = ""  # of the processes that it starts
        self._what = ""
        self._deadline = 0.0  # for its next sign of life
        self._end = math.inf  # for the job, from its first sign on

    def submit(self, job: Job) -> Ended | None:
        """Starts on a job; None unless it can't be handed over."""
        self._tries = self._deaths = 0
        try:
            wire = ForkingPickler.dumps(job)
        except Exception as error:  # noqa: BLE001 - whatever an object raises that does not let itself be pickled
            why = f"cannot be handed to a worker process ({error}); isolate=false does it in this one"
            return Ended(job, self.index, fault=why, cause=Cause.ERROR)
        self._give(job, wire)
        return None

    def _give(self, job: Job, wire: memoryview) -> None:
        self._what = "it started"
        if self._printed is not None:
            self._printed.begin()
        self._arm.write("")
        try:
            if self._process is None:
                self._start()
            self._ours.send_bytes(wire)
        except OSError:  # it died while it had nothing to do
            self.end()
            self._start()
            with suppress(OSError):  # and again: the death is heard of as any other
                self._ours.send_bytes(wire)
        self.job = job
        self._tries += 1
        self._deadline, self._end = time.monotonic() + START_S, math.inf

    def _retry_elsewhere(self, job: Job) -> None:
        self.end()
        self._give(job, ForkingPickler.dumps(job))

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ours, theirs = context.Pipe()
        _limit_waiting(self._ours, MESSAGE_S)
        output, output_pipe = context.Pipe(duplex=False)
        self._printed = Printed(output, lambda lines: self._on_printed(self.job, lines))
        environ = self._conditions.environ
        self._mark = ".".join(filter(None, [environ.get(MARK, ""), secrets.token_hex(8)]))
        conditions = replace(self._conditions, environ={**environ, MARK: self._mark})
        # Not a daemon: a job may start processes of its own.
        process = context.Process(
            target=serve, args=(theirs, output_pipe, self._arm, conditions), daemon=False
        )
        process.start()
        self._process = process
        theirs.close()
        output_pipe.close()

    def sources(self) -> list[Any]:
        """What to wait for: an answer, something printed, the death of the process."""
        assert self._process is not None
        return [self._ours, self._process.sentinel, *self._pipes()]

    def _pipes(self) -> list[Any]:
        return [self._printed.pipe] if self._printed is not None and self._printed.pipe is not None else []

    def seconds_left(self) -> float:
        """Until its silence, or the job, has been too long."""
        return min(self._deadline, self._end) - time.monotonic()

    def poll(
        self, ready: Sequence[Any], on_sign: OnSign, on_partial: OnPartial, on_stage: OnStage
    ) -> Ended | None:
        """Takes in what is there; how its job ended, if it has."""
        assert self._process is not None
        if self._printed is not None and self._printed.pipe in ready:
            self._printed.listen()
        try:
            while self._ours.poll():
                message = self._receive()
                if isinstance(message, Answer):
                    return self._answered(message)
                if isinstance(message, Partial):
                    on_partial(self.job, self.index, message.result)
                    self._ours.send(None)
                    self._deadline = time.monotonic() + self._timeout_s
                    continue
                if isinstance(message, Stage):
                    on_stage(self.job, message)
                    continue
                self._what = message.what
                now = time.monotonic()
                self._deadline, self._end = now + self._timeout_s, min(self._end, now + self._wall_s)
                on_sign(self.job, message.done, message.total)
        except _UnreadableError as error:
            # Of no arm: what an arm wrote there is read when another may be under way.
            return self._failed(f"its rows cannot be read: {error}")
        except (EOFError, OSError):
            return self._died()
        if self._process.sentinel in ready:
            return self._died()
        if self.seconds_left() > 0:
            return None
        if self._end < self._deadline:  # of no arm: the one under way may be the least of it
            where = self._where("after")
            late = f"not done within {self._wall_s:g} s{where}; case_wall_s=SECONDS allows more"
            return self._failed(late, cause=Cause.TIMEOUT)
        silence = f"no sign of life for {self._timeout_s:g} s{self._where('since')}"
        silent = f"{silence}; case_timeout_s=SECONDS allows more"
        return self._failed(silent, self._arm.read(), Cause.TIMEOUT)

    def _receive(self) -> Sign | Partial | Stage | Answer:
        """The next message; EOFError or OSError where the pipe is closed."""
        try:
            wire = self._ours.recv_bytes()
        except (BlockingIOError, MemoryError, OverflowError) as error:
            raise _UnreadableError(f"a message broke off ({one_line(error)})") from error
        try:
            message = pickle.loads(wire)
        except Exception as error:  # whatever an object raises when it is made anew
            raise _UnreadableError(one_line(error)) from error
        if not isinstance(message, Sign | Partial | Stage | Answer):
            raise _UnreadableError(f"it sent a {type(message).__name__}")
        return message

    def _answered(self, answer: Answer) -> Ended | None:
        if answer.fault:
            return self._failed(answer.fault)
        if isinstance(answer.result, Resubmit):
            self._retry_elsewhere(answer.result.job)
            return None
        self._last_lines()  # they are of this job
        job, self.job = self.job, None
        if answer.spoiled:
            self.end()
        return Ended(job, self.index, self._tries, answer.result)

    def _died(self) -> Ended | None:
        assert self._process is not None
        assert self.job is not None
        self._process.join(5)
        self._deaths += 1
        if self._deaths == 1:
            self._retry_elsewhere(self.job)
            return None
        times = "twice" if self._deaths == 2 else f"{self._deaths} times"
        how = ending(self._process.exitcode or 0)
        printed = self._last_lines()
        said = f": {printed.splitlines()[-1][:200]}" if printed else ""
        fault = f"its process died {times} ({how}){self._where('after')}{said}; resume=RUN_ID runs it again"
        return self._failed(fault, self._arm.read(), Cause.DIED)

    def _where(self, preposition: str) -> str:
        """In words, what was under way."""
        arm = self._arm.read()
        return f"{f' in arm {arm}' if arm else ''} {preposition} {self._what}"

    def _failed(self, fault: str, arm: str = "", cause: Cause = Cause.ERROR) -> Ended | None:
        """The end of the job; None where one arm is at fault and the job continues without it."""
        printed = self._last_lines()
        self.end()
        job, self.job = self.job, None
        rest = job.drop_arm(arm, fault, printed, cause) if arm and isinstance(job, Splittable) else None
        if rest is not None:
            self._retry_elsewhere(rest)
            return None
        return Ended(job, self.index, self._tries, fault=fault, cause=cause, printed=printed)

    def _last_lines(self) -> str:
        return "" if self._printed is None else self._printed.last_lines()

    def end(self) -> None:
        """End the process and all processes that it started."""
        if self._process is None:
            return
        below = {}
        if self._process.pid is not None:
            below = descendants(self._process.pid)
            kill_group(self._process.pid)
        self._process.kill()
        kill_marked(self._mark, servers=True)
        kill_each(below)  # those that have cleared their environment
        self._process.join(10)  # one that hangs in the driver can't be waited for
        self._ours.close()
        if self._printed is not None:
            self._printed.last_lines()
            self._printed.close()
        self._process = self._printed = None


def _limit_waiting(connection: Connection, seconds: float) -> None:
    """From now on reading raises BlockingIOError where nothing more comes for so long: half a message must not stop a sweep."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))
