"""Arms as the parent has them: a process each, which lives for the whole sweep and is told what to do a block at a time.

An arm of several ranks is as many processes, of one case: each is told the same, and of samples the slowest rank's count.

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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.engine import arm_process, calls, process_state
from harness.engine.arm_process import Conditions, answered
from harness.engine.far import Far
from harness.engine.rows import PreparedArm, row
from harness.engine.served import PRELOADED, Served
from harness.engine.stages import Stage, StageKind, Steps
from harness.machine import fork_server, ranks, torchrun
from harness.machine.processes import Deadline, patience, watch_stops
from harness.store.case import original_name
from harness.store.errors import Cause, LateError, RemoteError, cause_of, one_line
from harness.timing.clock import Split
from harness.timing.timers import CpuTimer
from harness.timing.workload import Numerics, Workload

if TYPE_CHECKING:
    from harness.engine.bench import Setting
    from harness.engine.plan import PlannedCase
    from harness.store.measurement import Measurement
    from harness.timing.config import TimingConfig
    from harness.timing.timers import L2State


COMPILER = "torch._inductor.compile_fx"  # some seconds, once in the server for all processes
SILENCE_S = 1800.0  # without a sign of life, beside the time that the timing itself may take
TIE_S = 0.1  # for a rank that was at fault a moment before the one that is known to be
LEAK_BYTES = (
    2**30
)  # of resident memory above what the first case of a process left: then another takes its place

OnMessage = Callable[[Stage | Steps | list[str]], None]
Meanwhile = Callable[[], object] | None
_anew: list[str] = []  # why processes are not forked


UNFIT = (
    RemoteError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
)  # the last ones: of data that an arm has made up


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long things may take.

    Attributes:
        silence_s: a process may work on one call for so long without a sign of life.
        wall_s: a case, or a run, may take so long in all.
        budget_s: start nothing after so many seconds.
        grace_s: for the rank at fault to show, after another one has seen that its peer is gone.
    """

    silence_s: float = SILENCE_S
    wall_s: float = math.inf
    budget_s: float = math.inf
    grace_s: float = 3.0


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


class ArmRunner:
    """Where an arm is: here, in this process, whose arms share what belongs to a process; see `Process`.

    Args:
        device: "cpu" or "cuda".

    Attributes:
        pids: numbers of its processes; none for this one.
        world: how many ranks it is.
        lost: why this process can use its device no more; "" while it can. Every later call fails by that, and not by its own.
    """

    pids: tuple[int, ...] = ()
    world, lost = 1, ""

    def __init__(self, device: str) -> None:
        self._device = device
        watch_stops()
        process_state.begin()

    def call(self, fn: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """`call_each`, of the first rank or of the one at fault."""
        return self.call_each(fn, *args, **how)[0]

    def call_each(
        self,
        fn: Callable[..., Any],
        *args: Any,
        what: str = "",
        meanwhile: Meanwhile = None,
        notify: OnMessage = lambda sign: None,
    ) -> list[Any]:
        """What `fn(notify, *args)` returns there, as JSON has it, by rank; where one is at fault, its result alone.

        Args:
            fn: of `harness.engine.arm_process`.
            args: as `harness.engine.calls` takes them.
            what: is under way, for the words of a fault.
            meanwhile: called here while it works.
            notify: given its signs of life.

        Raises:
            RemoteError: it raised there, or the process is gone, silent, or has lost its device.
            LateError: it was not done in time.
        """
        answers = self._answers(fn, args, what, meanwhile, notify)
        for answer in answers:
            if "failed" in answer:
                raise RemoteError(str(answer["failed"]), Cause(answer["cause"]))
        return [answer["result"] for answer in answers]

    def _answers(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        what: str,
        meanwhile: Meanwhile,
        notify: OnMessage,
    ) -> list[dict[str, Any]]:
        if self.lost:
            raise RemoteError(self.lost, Cause.DEVICE_LOST)
        answer: dict[str, Any] = json.loads(answered(fn, args, notify, (Exception, SystemExit)))
        self.lost = self.lost or arm_process.lost(self._device)
        if meanwhile is not None:
            meanwhile()
        return [answer]

    def close(self, until: Deadline | None = None) -> None:
        """End it, or give up all arms; `until`: for it to be gone."""
        arm_process.clear(lambda sign: None, "cpu")


class Process(ArmRunner):
    """A process, or one for each rank, that does what it is asked, until it is closed or has died.

    Args:
        conditions: that it starts with.
        limits: of its silence.
        notify: given the lines that it prints.
        world: ranks.
        device: of their process group.

    Attributes:
        fault: why it can be asked no more; "" while it can.
        until: it may work until then (`time.monotonic`), whatever it says.

    Raises:
        RemoteError: its ranks could not meet.
    """

    def __init__(
        self,
        conditions: Conditions,
        limits: TimeLimits,
        notify: OnMessage,
        world: int = 1,
        device: str = "cpu",
    ) -> None:
        self._limits, self.fault, self.until, self.world = limits, "", math.inf, world
        self._notify, self._conditions, self._device = notify, conditions, device
        try:
            self._start()
            # A suite's module makes arms of all installed peers, asked for or not, and so imports them in the server
            culprits = self.call_each(arm_process.started_threads, what="its start") if not _anew else []
            if culprit := next(filter(None, culprits), ""):
                _anew.append(
                    f"importing {culprit} starts threads, which a fork does not take over: each process is started anew, in "
                    "seconds"
                )
                notify(_anew)
                self.close()
                self.fault = ""
                self._start()
            if world > 1:
                self.call(arm_process.join, what="its start")
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._ones: list[Served | Far] = []
        if self.world == 1:
            self._ones.append(Served(self._conditions, self._notify, anew=bool(_anew)))
        else:
            # A collective must not end before whoever waits for the ranks finds the one that does not come
            patience_s = 2 * self._limits.silence_s + 60
            self._folder = tempfile.TemporaryDirectory()
            of_torchrun = torchrun.leads(self.world)
            store = torchrun.meeting() if of_torchrun else f"{self._folder.name}/store"
            found = ranks.Meeting(self.world, self._device, store, patience_s, torchrun.hosts(self.world))
            for rank in range(self.world):
                if of_torchrun and rank:
                    self._ones.append(Far(rank, found, self._lines_of(rank), anew=bool(_anew)))
                    continue
                gpu, interface = (
                    (torchrun.local_rank(), torchrun.interface(found.hosts)) if of_torchrun else (rank, "lo")
                )
                seat = ranks.Seat(rank, gpu, interface, found)
                self._ones.append(Served(self._conditions, self._lines_of(rank), seat, anew=bool(_anew)))
        self.pids = tuple(one.pid for one in self._ones if one.pid)

    def _lines_of(self, rank: int) -> Callable[[list[str]], None]:
        return lambda lines: self._notify([f"rank {rank}: {line}" for line in lines])

    def _answers(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        what: str,
        meanwhile: Meanwhile,
        notify: OnMessage,
    ) -> list[dict[str, Any]]:
        if self.fault:
            raise RemoteError(self.fault, Cause.DIED)
        try:
            message = calls.message(fn, args)
            for one in self._ones:
                one.send(message)
        except (TypeError, ValueError) as error:
            why = f"cannot be handed to a worker process: {error}; isolate=false does it in this one"
            raise RemoteError(why, Cause.ERROR) from error
        if meanwhile is not None:
            meanwhile()
        found: dict[int, dict[str, Any]] = {}
        wrong: list[tuple[bool, float, int]] = []  # of a peer, when, which rank
        silent, ends = time.monotonic() + self._limits.silence_s, math.inf
        while len(found) < self.world and (now := time.monotonic()) < ends:
            of = {on: rank for rank, one in enumerate(self._ones) if rank not in found for on in one.waited()}
            ready = wait([*of], max(0.0, min(silent, self.until, ends) - now))
            heard = {rank: self._ones[rank].heard(ready) for rank in sorted({of[on] for on in ready})}
            for rank, answer in heard.items():
                if answer is None:
                    continue
                silent = time.monotonic() + self._limits.silence_s
                if sign := _sign(answer):
                    what = f"step {sign.done} of {sign.total}" if isinstance(sign, Steps) else what
                    if not rank:  # which speaks for all
                        notify(sign)
                    continue
                found[rank] = answer
                if "result" not in answer or "raised_at" in answer:
                    of_a_peer = bool(answer.get("of_a_peer"))
                    wrong.append((of_a_peer, float(answer.get("raised_at", time.monotonic())), rank))
                    grace_s = self._limits.grace_s + max(one.silent_s for one in self._ones)
                    ends = min(ends, time.monotonic() + (grace_s if of_a_peer else TIE_S))
            if not any(heard.values()) and not wrong:
                self._refuse_to_wait(found, silent, what)
        if not wrong:
            return [found[rank] for rank in range(self.world)]
        *_, guilty = min(wrong)
        return [self._of_the_guilty(guilty, found[guilty], what, len(found) == self.world)]

    def _refuse_to_wait(self, found: dict[int, Any], silent: float, what: str) -> None:
        """Ends all, where the time is up."""
        if time.monotonic() >= self.until:
            self._end(
                f"not done within {self._limits.wall_s:g} s after {what}; case_wall_s=SECONDS allows more"
            )
            raise LateError(self.fault)
        if time.monotonic() < silent:
            return
        stand = ""
        if self.world > 1:
            stacks = {rank: one.stack() for rank, one in enumerate(self._ones) if rank not in found}
            stand = ranks.late(stacks, {*found}, self.world)[1] + "; "
        why = (
            f"{stand}no sign of life for {self._limits.silence_s:g} s since {what}: it computes for longer, which "
            "case_timeout_s=SECONDS allows, or waits for what never comes, which no time mends"
        )
        self._end(why)
        raise RemoteError(why, Cause.TIMEOUT)

    def _of_the_guilty(
        self, rank: int, answer: dict[str, Any], what: str, all_answered: bool
    ) -> dict[str, Any]:
        """The answer of the rank at fault; its victims end."""
        who = f"rank {rank} of {self.world}{self._ones[rank].host}: " if self.world > 1 else ""
        if "lost" in answer:
            self._end(f"{who}{answer['lost']}")
            raise DiedError(self.fault, "")
        if "died" in answer:
            printed = answer["printed"]
            last_line = f": {printed.splitlines()[-1][:200]}" if printed else ""
            self._end(
                f"{who}its process died ({answer['died']}) after {what}{last_line}; resume=RUN_ID runs it again"
            )
            raise DiedError(self.fault, printed)
        if "unreadable" in answer:
            self._end(f"{who}its rows cannot be read: {answer['unreadable']}")
            raise RemoteError(self.fault, Cause.ERROR)
        if not all_answered:
            self._end(f"{who}it has failed, and the others wait for it")
        return answer

    def kill(self) -> None:
        """End the process and all that it has started; whoever waits for an answer hears of it."""
        for one in self._ones:
            one.kill()

    def _end(self, fault: str, until: Deadline | None = None) -> None:
        self.fault = fault
        self.kill()
        fork_server.end_if_stopped()
        until = until or patience()
        for one in self._ones:
            one.join(until)

    def close(self, until: Deadline | None = None) -> None:
        """See `ArmRunner`."""
        self._end(self.fault or "it has ended", until)
        for one in self._ones:
            one.close()
        if self.world > 1:
            self._folder.cleanup()


def _sign(answer: dict[str, Any]) -> Stage | Steps | None:
    """A sign of life."""
    if "Stage" in answer:
        return Stage(StageKind(answer["Stage"][0]), answer["Stage"][1])
    return Steps(*answer["Steps"]) if "Steps" in answer else None


class DiedError(RemoteError):
    """The process of an arm is gone: which may have come from outside (the kernel's memory killer, an operator).

    Attributes:
        printed: the last lines that it printed.
    """

    def __init__(self, reason: str, printed: str) -> None:
        super().__init__(reason, Cause.DIED)
        self.printed = printed


class ArmPool:
    """The arms' processes of one place; a context manager, which ends them.

    Args:
        conditions: of the processes; None: everything is done in this one.
        limits: of each.
        device: "cpu" or "cuda".
        notify: given the lines that they print.
    """

    def __init__(
        self,
        conditions: Conditions | None,
        limits: TimeLimits,
        device: str,
        notify: OnMessage = lambda sign: None,
    ) -> None:
        self._conditions, self._limits, self._device, self._notify = conditions, limits, device, notify
        self.runners: dict[str, ArmRunner] = {}
        self._settled: dict[str, int] = {}  # resident memory after the first case
        self._until = math.inf
        self._killed = False

    def __enter__(self) -> ArmPool:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self._processes():
            runner.kill()  # all of them before one is waited for
        self.keep(())

    def begin(self, arms: Sequence[str], world: int = 1) -> None:
        """A case of these arms begins, each of so many ranks, which have processes of their own: other processes end."""
        self._world, self._here = world, self._conditions is None and world == 1
        self._until = time.monotonic() + self._limits.wall_s
        self.keep([""] if self._here else arms)

    def keep(self, arms: Sequence[str]) -> None:
        """Ends the processes of all other arms."""
        until = patience()
        for name in self.runners.keys() - set(arms):
            self.retire(name, until)

    def of(self, arm: str) -> ArmRunner:
        """The process of an arm."""
        key = "" if self._here else arm
        if key not in self.runners:
            given = self._conditions or Conditions.here()
            self.runners[key] = (
                ArmRunner(self._device)
                if self._here
                else Process(given, self._limits, self._notify, self._world, self._device)
            )
        runner = self.runners[key]
        if isinstance(runner, Process):
            runner.until = self._until
            if self._killed:  # looked at once it is in `runners`, where `kill` may have missed it
                runner.kill()
        return runner

    def retire(self, arm: str, until: Deadline | None = None) -> None:
        """Ends the process of an arm: the next case gets another one."""
        key = "" if self._here else arm
        if (runner := self.runners.pop(key, None)) is not None:
            runner.close(until)
        self._settled.pop(key, None)

    def end(self, rows: Iterable[Measurement]) -> list[Measurement]:
        """The case has ended: what its arms hold is given up. A process is not used again that is a rank, whose arm failed, that
        keeps more and more memory, or for which the arm has set something (`process_state`): the rows say what.
        """
        rows, noted = list(rows), {}
        failed = {original_name(one.arm) for one in rows if one.status == "failed"}
        for name in [*self.runners] if self._world > 1 else failed if not self._here else ():
            self.retire(name)
        for key, runner in list(self.runners.items()):
            resident, changed = LEAK_BYTES * 1024, []
            with suppress(*UNFIT, LateError):
                left = runner.call(arm_process.clear, self._device, what="the end of its case")
                resident, changed = int(left["resident"]), [str(code) for code in left["changed"]]
            if changed:
                noted[key] = {"process_changed": changed}
            leaks = resident - self._settled.setdefault(key, resident) > LEAK_BYTES
            if isinstance(runner, Process) and (changed or leaks):
                self.retire(key)
        own = noted.get("", {})
        return [
            replace(one, resolved={**one.resolved, **noted.get(original_name(one.arm), own)}) for one in rows
        ]

    def lost(self) -> str:
        """Why this process itself can use its device no more; "" where it can, and where arms have others."""
        here = self.runners.get("")
        return here.lost if here is not None else ""

    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [pid for runner in self.runners.values() for pid in runner.pids]

    def kill(self) -> None:
        """From another thread: end all processes, and each that is started from now on, so that whoever waits for one goes on."""
        self._killed = True
        fork_server.end_if_stopped()  # or whoever waits for it to fork waits on
        for runner in self._processes():
            runner.kill()

    def _processes(self) -> list[Process]:
        return [runner for runner in self.runners.values() if isinstance(runner, Process)]


class RemoteArm:
    """An arm that is ready, in its process.

    Args:
        runner: its process.
        name: of the arm.
        device: "cpu" or "cuda".
        facts: of its workload.
    """

    def __init__(self, runner: ArmRunner, name: str, device: str, facts: dict[str, Any]) -> None:
        self._runner, self.name, self._device, self.timer = runner, name, device, facts["timer"]
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

    def call_each(self, fn: Callable[..., Any], *args: Any, meanwhile: Meanwhile = None) -> list[Any]:
        """See `ArmRunner.call_each`."""
        what = f"timing began in arm {self.name}"
        return self._runner.call_each(fn, self.name, *args, what=what, meanwhile=meanwhile)

    @contextmanager
    def _resident(self) -> Iterator[None]:
        self.call_each(arm_process.allocate)
        try:
            yield
        finally:
            with suppress(RemoteError):  # a fault was raised where it happened
                self.call_each(arm_process.release, self._device)

    def finish(self) -> tuple[str, Cause]:
        """Why its times do not count, and the cause; takes in what its workload has found meanwhile."""
        try:
            every = self.call_each(arm_process.finish)
        except RemoteError as error:  # a timing that failed by it has its own words for it
            return f"what it did while it was timed is not known: {one_line(error)}", error.cause
        assert isinstance(self.workload.resolved, dict)
        self.workload.resolved.update(every[0]["resolved"])
        found = next((one for one in every if one["fault"]), every[0])
        return str(found["fault"]), Cause(found["cause"])


def prepared(
    arm_pool: ArmPool,
    planned: PlannedCase,
    name: str,
    setting: Setting,
    rows: list[Measurement],
    notify: OnMessage,
) -> tuple[PreparedArm, RemoteArm] | None:
    """Build, compile and check an arm in its process.

    Args:
        arm_pool: of the processes.
        planned: the case.
        name: of the arm.
        setting: how cases are measured.
        rows: gets the arm's rows up to its timing.
        notify: given the stages.

    Returns:
        None where the arm may not be timed; its last row says why.
    """
    try:
        runner = arm_pool.of(name)
        folder = setting.folder if runner.world == 1 else None  # ranks would write the same file
        how = arm_process.How(setting.device, folder, setting.warm_compile, setting.in_turns)
        what = f"it was begun in arm {name}"
        made = runner.call(arm_process.prepare, planned, name, *how, what=what, notify=notify)
        for sent in made["rows"]:
            own = {field: sent[field] for field in arm_process.SENT}
            own |= {"cause": Cause(sent["cause"]), "samples": tuple(sent["samples"])}
            rows.append(row(planned, name, **own))
        if made["facts"] is None:
            return None
        remote = RemoteArm(runner, name, setting.device, made["facts"])
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
            self.arm.call_each(arm_process.call, self.name, queued)


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
        every = fn.arm.call_each(arm_process.sample, *how, meanwhile=probe)
        self.late = max(taken["late"] for taken in every)
        self.disturbed = next((taken["disturbed"] for taken in every if taken["disturbed"]), "")
        if split is not None:
            split.samples_ms = _slowest([taken["split"] for taken in every])
        return _slowest([taken["samples"] for taken in every])

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


def _slowest(by_rank: list[list[float]]) -> list[float]:
    """The longest time of any rank by sample; [] where a rank has none."""
    return [float(max(times)) for times in zip(*by_rank, strict=True)] if all(by_rank) else []


def _checked() -> Numerics:
    raise AssertionError("an arm was checked in its own process")
