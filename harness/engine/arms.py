"""Arms as the parent has them: a process each, which lives for the whole sweep and is told what to do a block at a time.

The process takes its samples itself (`harness.engine.arm_process`); no message is in a sample, and all arms of a case stay in the
same rounds, in random order. Where they compute on one GPU, all but one are idle at any time, and what the allocator of one
keeps in reserve is released before the next one builds. An arm whose process dies, or is silent for too long, fails alone.

Processes are forked, in some ten milliseconds, from a server that has imported torch and the suites, runs nothing and so holds
no threads that a fork could lose.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.engine import arm_process, process_state
from harness.engine.arm_process import Conditions, answered, serve
from harness.engine.rows import PreparedArm, row
from harness.engine.stages import Stage, StageKind, Steps
from harness.machine import fork_server
from harness.machine.processes import MARK, Deadline, ending, kill_all_of, patience, watch_stops
from harness.store.case import original_name
from harness.store.errors import Cause, LateError, RemoteError, cause_of, one_line
from harness.timing.clock import Split
from harness.timing.timers import CpuTimer
from harness.timing.workload import Numerics, Workload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from harness.engine.bench import Setting
    from harness.engine.plan import PlannedCase
    from harness.store.measurement import Measurement
    from harness.timing.config import TimingConfig
    from harness.timing.timers import L2State


KEPT_BYTES = 4000  # of what was printed last
HANDED_BYTES = 65_536  # of one job: a log is no place for more
READ_BYTES = 1 << 16

OnLines = Callable[[list[str]], None]


class Printed:
    """Standard output and error of one worker, by a pipe.

    Args:
        pipe: the end to read from.
        on_lines: given whole lines as they come, of one job at most `HANDED_BYTES`.
    """

    def __init__(self, pipe: Connection, on_lines: OnLines) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.inode = os.fstat(pipe.fileno()).st_ino  # by which whoever holds the other end is known
        self._on_lines = on_lines
        self._kept = self._line = b""
        self._handed = 0
        self.pipe: Connection | None = pipe

    def begin(self) -> None:
        """Another job begins."""
        self._kept, self._handed = b"", 0

    def listen(self) -> None:
        """Reads what there is."""
        try:
            while self.pipe is not None and (piece := os.read(self.pipe.fileno(), READ_BYTES)):
                self._kept = (self._kept + piece)[-KEPT_BYTES:]
                self._hand_on(piece)
                if len(piece) < READ_BYTES:
                    return  # one that never stops printing must not keep this process from its other workers
        except BlockingIOError:
            return
        self.close()  # the worker has closed its end

    def last_lines(self) -> str:
        """The end of what the job has printed, of what was read."""
        if self._line:
            self._hand_on(b"\n")
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Reads no more."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _hand_on(self, piece: bytes) -> None:
        *lines, self._line = (self._line + piece).split(b"\n")
        self._line = self._line[-HANDED_BYTES:]
        if not lines or self._handed > HANDED_BYTES:
            return
        self._handed += sum(len(line) + 1 for line in lines)
        more = [b"(left out: what this job prints from here on)"] if self._handed > HANDED_BYTES else []
        self._on_lines([line.decode(errors="replace") for line in (*lines, *more)])


PRELOADED = ["harness.engine.arm_process"]  # nothing of it starts a thread; pyarrow would
COMPILER = "torch._inductor.compile_fx"  # some seconds, once in the server for all processes
SILENCE_S = 1800.0  # without a sign of life, beside the time that the timing itself may take
MESSAGE_BYTES = 2**28
LEAK_BYTES = (
    2**30
)  # of resident memory above what the first case of a process left: then another takes its place

Tell = Callable[[Stage | Steps | list[str]], None]
Meanwhile = Callable[[], object] | None
_starting = threading.Lock()
_anew: list[str] = []  # why processes are not forked


UNFIT = (
    RemoteError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
)  # the last ones: of data that an arm has made up


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take.

    Attributes:
        silence_s: a process may work on one call for so long without a sign of life.
        wall_s: a case, or a run, may take so long in all.
        budget_s: start nothing after so many seconds.
    """

    silence_s: float = SILENCE_S
    wall_s: float = math.inf
    budget_s: float = math.inf


def silence_s(timing: TimingConfig) -> float:
    """How long a process may be silent: while it gets an arm ready, times one block, or makes one step of a run."""
    load = timing.sustained_seconds + timing.sustained_lead_seconds
    return SILENCE_S + 2 * (timing.warmup_max_seconds + timing.max_seconds + load)


def start_server(suites: Iterable[object] = (), *, compiles: bool = False) -> None:
    """Start the server that processes are forked from; it imports what they need while this process continues.

    Processes are forked whether or not this was called; the first is there the sooner.

    Args:
        suites: those of the plan. Modules are imported by the server, once for all.
        compiles: some arm is compiled.
    """
    modules = sorted({suite.__name__ for suite in suites if isinstance(suite, ModuleType)})
    fork_server.context([*PRELOADED, *modules, *([COMPILER] if compiles else [])])


class Link:
    """Where an arm is: here, in this process, whose arms share what belongs to a process; see `Process`.

    Args:
        device: "cpu" or "cuda".

    Attributes:
        pid: number of its process; 0 for this one.
        lost: why this process can use its device no more; "" while it can. Every later call fails by that, and not by its own.
    """

    pid, lost = 0, ""

    def __init__(self, device: str) -> None:
        self._device = device
        watch_stops()
        process_state.begin()

    def ask(
        self,
        fn: Callable[..., Any],
        *args: Any,
        what: str = "",
        meanwhile: Meanwhile = None,
        tell: Tell = lambda sign: None,
    ) -> Any:
        """What `fn(tell, *args)` returns there, as JSON has it.

        Args:
            fn: of `harness.engine.arm_process`.
            args: picklable.
            what: is under way, for the words of a fault.
            meanwhile: called here while it works.
            tell: given its signs of life.

        Raises:
            RemoteError: it raised there, or the process is gone, silent, or has lost its device.
            LateError: it was not done in time.
        """
        answer = self._answer(fn, args, what, meanwhile, tell)
        if "failed" in answer:
            raise RemoteError(str(answer["failed"]), Cause(answer["cause"]))
        return answer["result"]

    def _answer(
        self, fn: Callable[..., Any], args: tuple[Any, ...], what: str, meanwhile: Meanwhile, tell: Tell
    ) -> dict[str, Any]:
        if self.lost:
            raise RemoteError(self.lost, Cause.DEVICE_LOST)
        answer: dict[str, Any] = json.loads(answered(fn, args, tell, (Exception, SystemExit)))
        self.lost = self.lost or arm_process.lost(self._device)
        if meanwhile is not None:
            meanwhile()
        return answer

    def close(self, until: Deadline | None = None) -> None:
        """End it, or give up all arms; `until`: for it to be gone."""
        arm_process.clear(lambda sign: None, "cpu")


class Process(Link):
    """A process that does what it is asked, until it is closed or has died.

    Args:
        conditions: that it starts with.
        limits: of its silence.
        tell: given the lines that it prints.

    Attributes:
        pid: its number.
        fault: why it can be asked no more; "" while it can.
        until: it may work until then (`time.monotonic`), whatever it says.
    """

    def __init__(self, conditions: Conditions, limits: Limits, tell: Tell) -> None:
        self._limits, self.fault, self.until = limits, "", math.inf
        self._tell, self._conditions = tell, conditions
        self._start()
        # A suite's module makes arms of all installed peers, asked for or not, and so imports them in the server
        if not _anew and (culprit := self.ask(arm_process.started_threads, what="its start")):
            _anew.append(
                f"importing {culprit} starts threads, which a fork does not take over: each process is started anew, in seconds"
            )
            tell(_anew)
            self.close()
            self.fault = ""
            self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn") if _anew else fork_server.context(PRELOADED)
        self._ours, theirs = context.Pipe()
        output, output_pipe = context.Pipe(duplex=False)
        self._printed = Printed(output, self._tell)
        environ = self._conditions.environ
        self._mark = ".".join(filter(None, [environ.get(MARK, ""), secrets.token_hex(8)]))
        own = replace(self._conditions, environ={**environ, MARK: self._mark})
        # Not a daemon: a suite may start processes of its own.
        self._process: BaseProcess = context.Process(
            target=serve, args=(theirs, output_pipe, own), daemon=False
        )
        with _starting:
            self._process.start()
        self.pid = self._process.pid or 0
        theirs.close()
        output_pipe.close()

    def _answer(
        self, fn: Callable[..., Any], args: tuple[Any, ...], what: str, meanwhile: Meanwhile, tell: Tell
    ) -> dict[str, Any]:
        if self.fault:
            raise RemoteError(self.fault, Cause.DIED)
        self._printed.begin()
        try:
            message = ForkingPickler.dumps((fn, args))
        except Exception as error:  # whatever an object raises that does not let itself be pickled
            why = (
                f"cannot be handed to a worker process ({one_line(error)}); isolate=false does it in this one"
            )
            raise RemoteError(why, Cause.ERROR) from error
        with suppress(OSError):  # that it is gone shows below
            self._ours.send_bytes(message)
        if meanwhile is not None:
            meanwhile()
        deadline = time.monotonic() + self._limits.silence_s
        while True:
            pipe = [self._printed.pipe] if self._printed.pipe is not None else []
            left = min(deadline, self.until) - time.monotonic()
            # The pipe last: where the answer is there, so is all that was printed before it.
            ready = wait([self._ours, self._process.sentinel, *pipe], max(0.0, left))
            if self._printed.pipe in ready:
                self._printed.listen()
            if self._ours in ready:
                answer = self._receive(what)
                if "Stage" in answer:
                    tell(Stage(StageKind(answer["Stage"][0]), answer["Stage"][1]))
                elif "Steps" in answer:
                    tell(Steps(*answer["Steps"]))
                    what = f"step {answer['Steps'][0]} of {answer['Steps'][1]}"
                else:
                    self._printed.last_lines()
                    return answer
                deadline = time.monotonic() + self._limits.silence_s
            elif self._process.sentinel in ready:
                self._died(what)
            elif time.monotonic() >= self.until:
                self._end(
                    f"not done within {self._limits.wall_s:g} s after {what}; case_wall_s=SECONDS allows more"
                )
                raise LateError(self.fault)
            elif time.monotonic() >= deadline:
                why = (
                    f"no sign of life for {self._limits.silence_s:g} s since {what}: it computes for longer, which "
                    "case_timeout_s=SECONDS allows, or waits for what never comes, which no time mends"
                )
                self._end(why)
                raise RemoteError(why, Cause.TIMEOUT)

    def _receive(self, what: str) -> dict[str, Any]:
        """The next message: data, whatever the arm has made of its process."""
        try:
            answer = json.loads(self._ours.recv_bytes(MESSAGE_BYTES))
            if isinstance(answer, dict) and answer.keys() & {"result", "failed", "Stage", "Steps"}:
                return answer
            why = "no message"
        except EOFError:
            self._died(what)
        except ConnectionError:
            self._died(what)
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            why = one_line(error)
        self._end(f"its rows cannot be read: {why}")
        raise RemoteError(self.fault, Cause.ERROR)

    def _died(self, what: str) -> None:
        self._process.join(5)
        self._printed.listen()
        printed = self._printed.last_lines()
        said = f": {printed.splitlines()[-1][:200]}" if printed else ""
        how = ending(self._process.exitcode or 0)
        self._end(f"its process died ({how}) after {what}{said}; resume=RUN_ID runs it again")
        raise DiedError(self.fault, printed)

    def kill(self) -> None:
        """End the process and all that it has started; whoever waits for an answer hears of it."""
        kill_all_of(self.pid, self._mark, self._printed.inode)
        self._process.kill()

    def _end(self, fault: str, until: Deadline | None = None) -> None:
        self.fault = fault
        self.kill()
        fork_server.end_if_stopped()
        self._process.join((until or patience()).left())

    def close(self, until: Deadline | None = None) -> None:
        """See `Link`."""
        self._end(self.fault or "it has ended", until)
        self._ours.close()
        self._printed.listen()
        self._printed.last_lines()
        self._printed.close()


class DiedError(RemoteError):
    """The process of an arm is gone: which may have come from outside (the kernel's memory killer, an operator).

    Attributes:
        printed: the last lines that it printed.
    """

    def __init__(self, reason: str, printed: str) -> None:
        super().__init__(reason, Cause.DIED)
        self.printed = printed


class Crew:
    """The arms' processes of one place; a context manager, which ends them.

    Args:
        conditions: of the processes; None: everything is done in this one.
        limits: of each.
        device: "cpu" or "cuda".
        tell: given the lines that they print.
    """

    def __init__(
        self, conditions: Conditions | None, limits: Limits, device: str, tell: Tell = lambda sign: None
    ) -> None:
        self._conditions, self._limits, self._device, self._tell = conditions, limits, device, tell
        self.links: dict[str, Link] = {}
        self._settled: dict[str, int] = {}  # resident memory after the first case
        self._until = math.inf
        self._killed = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._processes():
            link.kill()  # all of them before one is waited for
        self.keep(())

    def begin(self, arms: Sequence[str], shared: bool = False) -> None:
        """A case of these arms begins: other processes end. `shared`: all of them have one process (their ranks are in it)."""
        self._shared = "" if shared or self._conditions is None else None
        self._until = time.monotonic() + self._limits.wall_s
        self.keep(arms if self._shared is None else [""])

    def keep(self, arms: Sequence[str]) -> None:
        """Ends the processes of all other arms."""
        until = patience()
        for name in self.links.keys() - set(arms):
            self.retire(name, until)

    def of(self, arm: str) -> Link:
        """The process of an arm."""
        key = arm if self._shared is None else self._shared
        if key not in self.links:
            given = self._conditions
            self.links[key] = (
                Link(self._device) if given is None else Process(given, self._limits, self._tell)
            )
        link = self.links[key]
        if isinstance(link, Process):
            link.until = self._until
            if self._killed:  # looked at once it is in `links`, where `kill` may have missed it
                link.kill()
        return link

    def retire(self, arm: str, until: Deadline | None = None) -> None:
        """Ends the process of an arm: the next case gets another one."""
        key = arm if self._shared is None else self._shared
        if (link := self.links.pop(key, None)) is not None:
            link.close(until)
        self._settled.pop(key, None)

    def end(self, rows: Iterable[Measurement]) -> list[Measurement]:
        """The case has ended: what its arms hold is given up. A process is not used again whose arm failed, that keeps more and
        more memory, or for which the arm has set something (`process_state`): the rows say what.
        """
        rows, noted = list(rows), {}
        failed = {original_name(one.arm) for one in rows if one.status == "failed"}
        for name in failed if self._conditions is not None else ():
            self.retire(name)
        for key, link in list(self.links.items()):
            resident, changed = LEAK_BYTES * 1024, []
            with suppress(*UNFIT, LateError):
                left = link.ask(arm_process.clear, self._device, what="the end of its case")
                resident, changed = int(left["resident"]), [str(code) for code in left["changed"]]
            if changed:
                noted[key] = {"process_changed": changed}
            leaks = resident - self._settled.setdefault(key, resident) > LEAK_BYTES
            if isinstance(link, Process) and (changed or leaks):
                self.retire(key)
        own = noted.get("", {})
        return [
            replace(one, resolved={**one.resolved, **noted.get(original_name(one.arm), own)}) for one in rows
        ]

    def lost(self) -> str:
        """Why this process itself can use its device no more; "" where it can, and where arms have others."""
        here = self.links.get("")
        return here.lost if here is not None else ""

    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [link.pid for link in self.links.values() if link.pid]

    def kill(self) -> None:
        """From another thread: end all processes, and each that is started from now on, so that whoever waits for one goes on."""
        self._killed = True
        fork_server.end_if_stopped()  # or whoever waits for it to fork waits on
        for link in self._processes():
            link.kill()

    def _processes(self) -> list[Process]:
        return [link for link in self.links.values() if isinstance(link, Process)]


class RemoteArm:
    """An arm that is ready, in its process.

    Args:
        link: its process.
        name: of the arm.
        device: "cpu" or "cuda".
        facts: of its workload.
    """

    def __init__(self, link: Link, name: str, device: str, facts: dict[str, Any]) -> None:
        self._link, self.name, self._device, self.timer = link, name, device, facts["timer"]
        given: dict[str, Any] = {
            field: (RemoteClosure(self, field),) * length for field, length in facts["lengths"].items()
        }
        self.workload = Workload(
            run=RemoteClosure(self, "run"),
            check=_checked,
            flops=facts["flops"],
            resolved=facts["resolved"],
            resident=self._resident if facts["resident"] else None,
            split=Split() if facts["split"] else None,
            **given,
            **{field: facts[field] for field in arm_process.PLAIN},
        )

    def ask(self, fn: Callable[..., Any], *args: Any, meanwhile: Callable[[], object] | None = None) -> Any:
        """See `Link.ask`."""
        what = f"timing began in arm {self.name}"
        return self._link.ask(fn, self.name, *args, what=what, meanwhile=meanwhile)

    @contextmanager
    def _resident(self) -> Iterator[None]:
        self.ask(arm_process.enter)
        try:
            yield
        finally:
            with suppress(RemoteError):  # a fault was raised where it happened
                self.ask(arm_process.leave, self._device)

    def finish(self) -> tuple[str, Cause]:
        """Why its times do not count, and the cause; takes in what its workload has found meanwhile."""
        try:
            found = self.ask(arm_process.finish)
        except RemoteError as error:  # a timing that failed by it has its own words for it
            return f"what it did while it was timed is not known: {one_line(error)}", error.cause
        assert isinstance(self.workload.resolved, dict)
        self.workload.resolved.update(found["resolved"])
        return str(found["fault"]), Cause(found["cause"])


def prepared(
    crew: Crew, planned: PlannedCase, name: str, setting: Setting, rows: list[Measurement], tell: Tell
) -> tuple[PreparedArm, RemoteArm] | None:
    """Build, compile and check an arm in its process.

    Args:
        crew: of the processes.
        planned: the case.
        name: of the arm.
        setting: how cases are measured.
        rows: gets the arm's rows up to its timing.
        tell: given the stages.

    Returns:
        None where the arm may not be timed; its last row says why.
    """
    try:
        link = crew.of(name)
        made = link.ask(
            arm_process.prepare, planned, name, setting, what=f"it was begun in arm {name}", tell=tell
        )
        for sent in made["rows"]:
            own = {field: sent[field] for field in arm_process.SENT}
            own |= {"cause": Cause(sent["cause"]), "samples": tuple(sent["samples"])}
            rows.append(row(planned, name, **own))
        if made["facts"] is None:
            return None
        remote = RemoteArm(link, name, setting.device, made["facts"])
        baseline = planned.suite.ARMS[name].baseline
        return PreparedArm(name, baseline, remote.workload, made["facts"]["resolved"]), remote
    except UNFIT as error:
        rows.append(failed_row(planned, name, error))
        return None


def failed_row(planned: PlannedCase, arm: str, error: Exception) -> Measurement:
    """The row of an arm whose process has died or answered with what is no answer, with what it printed last."""
    printed = error.printed if isinstance(error, DiedError) else ""
    resolved = {"printed": printed} if printed else {}
    return row(planned, arm, "failed", "", resolved, one_line(error), cause=cause_of(error, Cause.ERROR))


@dataclass(slots=True, eq=False)
class RemoteClosure:
    """A closure of an arm. A call is queued, and made with the next samples or when somebody waits for the device."""

    arm: RemoteArm
    name: str
    queued: int = 0

    def __call__(self) -> None:
        self.queued += 1

    def take_queued(self) -> int:
        """Calls that are due now."""
        queued, self.queued = self.queued, 0
        return queued

    def wait(self) -> None:
        """Make the calls that are queued."""
        if queued := self.take_queued():
            self.arm.ask(arm_process.call, self.name, queued)


class RemoteTimer:
    """Takes samples in the arms' processes (`harness.timing.timers.Timer`).

    Args:
        arms: of a case; all have the same kind of timer.
        on_host: time by the host's clock.
        rotating: without a flush.
    """

    def __init__(self, arms: Sequence[RemoteArm], on_host: bool = False, rotating: bool = False) -> None:
        self._arms, self._on_host, self._rotating, self.late = arms, on_host, rotating, 0
        self.disturbed = ""
        like = {name: getattr(CpuTimer, name) for name in arm_process.TIMER}
        like = like if on_host or not arms else arms[0].timer
        self.method, self.hold, self.resolution_ms = like["method"], like["hold"], like["resolution_ms"]
        self.l2: L2State = "rotating" if rotating else like["l2"]
        self.block = functools.partial(self._take, "block")
        self.back_to_back = functools.partial(self._take, "back_to_back")

    def _take(
        self,
        way: str,
        fn: RemoteClosure,
        n: int,
        calls: int = 1,
        probe: Callable[[], None] | None = None,
        split: Split | None = None,
    ) -> list[float]:
        how = (fn.name, way, n, calls, fn.take_queued(), self._on_host, self._rotating, split is not None)
        taken = fn.arm.ask(arm_process.sample, *how, meanwhile=probe)
        self.late, self.disturbed = taken["late"], taken["disturbed"]
        if split is not None:
            split.samples_ms = taken["split"]
        return [float(sample) for sample in taken["samples"]]

    def rotating(self) -> RemoteTimer | None:
        """See `Timer`."""
        return RemoteTimer(self._arms, self._on_host, rotating=True) if self.l2 == "cold" else None

    def synchronize(self) -> None:
        """See `Timer`."""
        for arm in self._arms:
            run = arm.workload.run
            assert isinstance(run, RemoteClosure)
            run.wait()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """The range is opened where the work is done."""
        return nullcontext(name)


def _checked() -> Numerics:
    raise AssertionError("an arm was checked in its own process")
