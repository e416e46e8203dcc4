"""The process of an arm: what it is asked to do, one call at a time (`harness.engine.arms`).

It lives for the whole sweep and does the blocks of one arm, so that nothing an arm sets or breaks reaches another one. All that
it answers is JSON: an object that a suite put into a row becomes its text here and is never made anew in the parent. An arm of
several ranks is as many processes, each of which is asked the same: their suite sees a process group.
With `isolate=false` the same calls are made in the command's own process, and arms share what belongs to a process.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import json
import math
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, library, nn
from torch.nn.modules import module

from harness.engine import process_state
from harness.engine.calls import called
from harness.engine.rows import PreparedArm, about, numerics_rows, row
from harness.engine.stages import Stage, StageKind, Steps
from harness.machine import fork_server, ranks
from harness.machine.processes import (
    ENDING_SIGNALS,
    children,
    continued,
    end_children,
    end_with_parent,
    limit_memory,
    memory_of_this_process,
    waited_s,
    watch_stops,
)
from harness.store.errors import Cause, RemoteError, SpoiledError, cause_of, one_line, status_of
from harness.suites.common import Rotation, elements, leaves
from harness.timing import compiling
from harness.timing.clock import EventClock, HostClock
from harness.timing.peak import reaches
from harness.timing.timers import CpuTimer, CudaTimer, RanksTimer, Timer, release_memory, timer_for
from harness.timing.workload import Suite, TrialOutcome, TrialSuite

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from harness.engine.calls import Message
    from harness.engine.plan import PlannedCase
    from harness.store.measurement import Measurement
    from harness.timing.workload import Workload

OnStage = Callable[[Stage | Steps], None]

REPORT_S = 0.2  # between two messages about the steps of one run
LARGE = 2**20  # bytes of an output by which no second one is kept
WAIT_MS = 0.1  # what a host may take to see that a device is idle
WAITED = 0.05  # of a block, for which it had no core: other load disturbs it
SENT = (
    "metric",
    "status",
    "resolved",
    "reason",
    "samples",
    "cause",
    "part",
)  # of a row; the parent knows the rest
PLAIN = (
    "metric",
    "bytes_moved",
    "compiled",
    "on_host",
    "tokens",
    "split_metric",
    "unmetered",
)  # of a workload
LISTS = ("covering", "variants")  # of closures
TIMER = ("method", "l2", "resolution_ms", "hold")

_chance = random.SystemRandom()  # no seed by which an arm could know what is looked at
_clone = torch.clone


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a process takes over from its parent, whenever it is started.

    Attributes:
        environ: the environment variables.
        folder: the working folder.
        threads: of torch.
        memory_bytes: that it may ask for beyond what it starts with; None: no limit.
    """

    environ: Mapping[str, str]
    folder: str
    threads: int
    memory_bytes: int | None = None

    @classmethod
    def here(cls, memory_bytes: int | None = None, variables: Mapping[str, str] | None = None) -> Conditions:
        """The settings of this process; `variables` are added to its environment."""
        environ = {**os.environ, **(variables or {})}
        return cls(environ, str(Path.cwd()), torch.get_num_threads(), memory_bytes)


def serve(parent: Connection, output: Connection, conditions: Conditions, seat: ranks.Seat | None) -> None:
    """The process: answers until its parent has no more to ask, or is gone."""
    os.setpgrp()  # Ctrl-C reaches every process of the terminal's group; the parent decides what becomes of this one
    for number in ENDING_SIGNALS:  # a scheduler sends it to every process; a handler is not inherited
        signal.signal(number, lambda *_: None)
    watch_stops()
    end_with_parent()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    faulthandler.enable()
    if seat is not None:
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        _seats.append(seat)
    gc.freeze()  # what the server made is never garbage; looking through it would copy its pages
    os.environ.clear()
    os.environ.update(conditions.environ)
    os.chdir(conditions.folder)
    if conditions.memory_bytes is not None:
        limit_memory(conditions.memory_bytes)
    torch.set_num_threads(conditions.threads if seat is None else 1)
    process_state.begin()

    def notify(sign: Stage | Steps) -> None:
        parent.send_bytes(json.dumps({type(sign).__name__: sign}).encode())

    while True:
        try:
            asked = json.loads(parent.recv_bytes())
        except (EOFError, OSError):
            return
        answer = answered(_do, (asked,), notify, BaseException)
        sys.stdout.flush()
        parent.send_bytes(answer)


def _do(notify: OnStage, asked: Message) -> Any:
    fn, args = called(asked)
    return fn(notify, *args)


def answered(fn: Callable[..., Any], args: tuple[Any, ...], notify: OnStage, caught: Any) -> bytes:
    """What a call returns, or what it raised, as JSON; and of an exception that became rows whose fault it may be."""
    _raised.clear()
    try:
        return json.dumps({"result": plain(fn(notify, *args)), **_raised}).encode()
    except caught as error:
        _note(error)
        found = {"failed": plain(_words(error)), "cause": cause_of(error, Cause.RUN), **_raised}
        return json.dumps(found).encode()


def _words(error: BaseException) -> str:
    return f"{_seats[0]}: {one_line(error)}" if _seats else one_line(error)


def _note(error: BaseException) -> None:
    """Remembers what the other ranks may be victims of, and what has left this process unfit for its device."""
    _raised.update(raised_at=time.monotonic(), of_a_peer=ranks.of_a_peer(error))
    if isinstance(error, SpoiledError):
        _spoiled.append(one_line(error))


def plain(value: Any) -> Any:
    """A value as JSON has it; an object as its text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_text(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    return _text(value)


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - an object may be anyone's
        text = f"{type(value).__name__} without a text"
    return text.encode(
        errors="backslashreplace"
    ).decode()  # bytes that were no text, which Python keeps as surrogates


class _Held:
    """An arm that is ready."""

    def __init__(self, work: Workload, timer: Timer, device: str) -> None:
        self.work, self.timer, self.device = work, timer, device
        self.memory = ExitStack()
        self.outputs: dict[
            str, _Output | None
        ] = {}  # of each closure one of the last timed calls, chosen at random
        self.fastest_ms = math.inf  # by the median of a block
        self.unfinished_ms = (
            math.inf
        )  # for how long the device worked on after a call beyond twice a sample; of all blocks the least
        self.fault: tuple[str, Cause] = "", Cause.NONE  # why its times do not count
        self._turns: dict[str, Callable[[], object]] = {"run": work.run}

    @functools.cached_property
    def watch(self) -> compiling.CompileWatch:
        """Counts what the compiler does from the first use on: then all arms of the case are ready."""
        return compiling.CompileWatch()

    def closure(self, name: str) -> Callable[[], object]:
        """`run`, or the closures of a list in turns, which keep their place between two calls."""
        _ = self.watch
        if name not in self._turns:
            listed = getattr(self.work, name)
            turns = itertools.cycle([] if isinstance(listed, Rotation) else tuple(listed) or [self.work.run])
            self._turns[name] = listed if isinstance(listed, Rotation) else lambda: next(turns)()
        return self._turns[name]

    def take(
        self, closure: str, take: Callable[..., list[float]], n: int, calls: int, **marks: Any
    ) -> list[float]:
        """n samples. Contents change between them, outside of the clock; the output of one chosen at random is kept."""
        of = self.closure(closure)
        if not isinstance(of, Rotation):
            return take(of, n, calls, **marks)
        of.grow(n * calls)
        self.outputs[closure] = None  # the one before may be of operands that are gone
        chosen, samples = 1 + _chance.randrange(n), list[float]()
        while (done := len(samples)) < n:
            due = (chosen if done < chosen else n) - done
            due = max(1, min(due, of.begin(due * calls) // calls))
            marks["probe"] = functools.partial(self._keep, closure, of) if done + due == chosen else None
            samples += take(of, due, calls, **marks)
        self.fastest_ms = min(self.fastest_ms, statistics.median(samples))
        return samples

    def _keep(self, closure: str, of: Rotation) -> None:
        """Copies what the last call returned; on the stream of the calls, which waits for no other stream or thread."""
        found = list(leaves(of.result))
        if odd := [type(x).__name__ for x in found if type(x) not in (Tensor, nn.Parameter)]:
            why = f"{', '.join(odd)} is no plain tensor: it may be computed when it is read"
            self.fault = self.fault if self.fault[0] else (why, Cause.DEFERRED)
            return
        if sum(x.nbytes for x in found) > LARGE:
            self.outputs.clear()
        self.outputs[closure] = _Output(of, of.at, of.turned, _copied(of.result))

    def unproven(self) -> tuple[str, Cause]:
        """Why the times taken up to now do not count; looked at outside of the clock."""
        self.fault = self.fault if self.fault[0] else self._look()
        return self.fault

    def _look(self) -> tuple[str, Cause]:
        if others := changed(_CLOCKS):
            why = f"{', '.join(others)} changed since this process began, so that no time can be read"
            return why, Cause.TAMPERED
        kept, self.outputs = self.outputs, {}
        for one in kept.values():
            if one is None:
                return "no output of the timed calls was kept to be compared", Cause.UNPROVEN
            one.fill()
            if wrong := one.judged(one.result):
                return f"an output of the timed calls is not that of its inputs: {wrong}", Cause.STALE
            for x in leaves(one.again()):
                if x.numel() > 1:  # not a constant that many calls may share
                    _overwrite(x)
            one.fill()
            found = _copied(one.again())
            if not _same(found, one.result) and (wrong := one.judged(found)):
                why = f"a second call returned what was overwritten since the first one: {wrong}"
                return why, Cause.REPLAYED
        if WAIT_MS < self.unfinished_ms < math.inf:
            why = f"after each call the device works for {self.unfinished_ms:.3g} ms more than twice a sample"
            return f"{why}: on a stream that the clock does not see", Cause.DEFERRED
        rate = 1e3 * sum(self.work.flops.values()) / self.fastest_ms if self.fastest_ms else math.inf
        if not reaches(rate / 2, self.device, self.timer):
            why = f"{self.fastest_ms:.3g} ms are {rate:.3g} FLOP/s, over twice what products reach on this device"
            return why, Cause.TOO_FAST
        return "", Cause.NONE


@dataclass(frozen=True, slots=True)
class _Output:
    """What one timed call returned, as it was when the clock stopped, and by what its operands are made again."""

    of: Rotation
    at: tuple[Tensor, ...]
    turned: tuple[int, ...]
    result: Any

    def fill(self) -> None:
        """Makes its operands what they were: an arm may have written into them."""
        self.of.fill(self.turned)

    def again(self) -> Any:
        """What the function returns for them now."""
        return self.of.function(*self.at)

    def judged(self, result: Any) -> str:
        """What is wrong with a result; "" for nothing."""
        try:
            return self.of.judge(result, self.at, _chance.randrange(2**31))
        except Exception as error:  # noqa: BLE001 - of a result that cannot be compared
            return one_line(error)


def _copied(result: Any) -> Any:
    return [*map(_copied, result)] if type(result) in (tuple, list) else _clone(result.detach())


def _same(first: Any, second: Any) -> bool:
    """Whether two results agree to the bit."""
    pairs = zip(leaves(first), leaves(second), strict=True)
    return all(torch.equal(elements(x), elements(y)) for x, y in pairs)


@torch.inference_mode()
def _overwrite(x: Tensor) -> None:
    row = elements(x)
    row.fill_(float("nan") if row.is_floating_point() else 0xFF)


_held: dict[str, _Held] = {}
_spoiled: list[str] = []
_seats: list[ranks.Seat] = []  # of this process, at most one
_raised: dict[str, Any] = {}  # by the call under way, by the clock that all processes of a machine share
device_timer = functools.cache(timer_for)


def started_threads(notify: OnStage) -> str:
    """Names of threads that run after a fork, as `harness.machine.fork_server` asks for them."""
    return fork_server.started_threads


def refuse(notify: OnStage, why: str) -> None:
    """Answer that a call cannot be made."""
    raise RemoteError(why, Cause.ERROR)


def join(notify: OnStage) -> None:
    """Meet the other ranks."""
    ranks.join(_seats[0])
    process_state.begin()


def clear(notify: OnStage, device: str) -> dict[str, Any]:
    """Give up all arms; the resident bytes of this process, and what they have set for it."""
    _held.clear()
    compiling.reset()
    if device == "cuda":
        release_memory()
    return {"resident": memory_of_this_process("VmRSS"), "changed": process_state.changed()}


def lost(device: str) -> str:
    """Why this process can use its device no more; "" where it can. After a CUDA fault every later call fails."""
    try:
        device_timer(device).synchronize()
    except RuntimeError as error:
        return one_line(error)
    return _spoiled[0] if _spoiled else ""


class How(NamedTuple):
    """How an arm is got ready; see `harness.engine.bench.Setting`."""

    device: str
    folder: Path | None
    warm_compile: bool
    in_turns: bool


def prepare(notify: OnStage, planned: PlannedCase, name: str, *how: Any) -> dict[str, Any]:
    """Build, compile and check an arm, as `How` has it; only one that is right may be timed.

    Returns:
        Its rows up to here, and its facts; None where it may not be timed, as the last row says.
    """
    if not _seen:
        _seen.append(replaced())
    if _seen[0]:
        raise RemoteError(
            f"{_seen[0]} of PyTorch changed before any arm was built, so that no arm would be what it is called: an extension "
            "may change it in the functions of its peer alone",
            Cause.ERROR,
        )
    setting = How(*how)
    timer = device_timer(setting.device)
    begin_alike(planned.case.seed)
    rows: list[Measurement] = []
    arm = _prepared(notify, planned, name, setting, timer, rows)
    if setting.device == "cuda":
        release_memory()  # for the next arm, whose allocator is another
    sent = [{field: getattr(one, field) for field in SENT} for one in rows]
    if arm is None:
        return {"rows": sent, "facts": None}
    work = arm.workload
    _held[name] = _Held(work, work.timer or timer, setting.device)
    facts = {
        **{field: getattr(work, field) for field in PLAIN},
        "bytes_moved": None if work.bytes_moved is None else float(work.bytes_moved),
        "flops": {str(dtype): float(flops) for dtype, flops in work.flops.items()},
        "resolved": arm.resolved,
        "lengths": {field: len(getattr(work, field)) for field in LISTS},
        "resident": work.resident is not None,
        "split": work.split is not None,
        "timer": {field: getattr(_held[name].timer, field) for field in TIMER},
    }
    return {"rows": sent, "facts": facts}


def begin_alike(seed: int) -> None:
    """Every arm draws the same numbers from the global generators, in any order of arms."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is what an arm may draw from
    torch.default_generator.manual_seed(seed)
    for generator in torch.cuda.default_generators if torch.cuda.is_initialized() else ():
        generator.manual_seed(seed)  # not `torch.manual_seed`: without a GPU it keeps a note of each call


def _prepared(
    notify: OnStage, planned: PlannedCase, name: str, setting: How, timer: Timer, rows: list[Measurement]
) -> PreparedArm | None:
    suite, info = planned.suite, planned.suite.ARMS[name]
    assert isinstance(suite, Suite)
    resolved: dict[str, object] = {}
    try:
        workload = suite.build(planned.case, name, setting.device)
        resolved.update(workload.resolved)
        if setting.in_turns and not workload.compiled:
            resolved["operator_calls"] = _operators(workload)
        arm = PreparedArm(name, info.baseline, workload, resolved)
        if workload.compiled:
            notify(Stage(StageKind.COMPILE, name))
            rows += _compile(planned, arm, setting, timer)
            if rows[-1].status == "failed":
                return None
        notify(Stage(StageKind.CHECK, name))
        numerics = workload.check()
        resolved.update(workload.resolved)  # a check may learn what really ran
        if numerics.ok and workload.profile is not None and setting.folder is not None:
            profiled = workload.profile(setting.folder)
            resolved.update(workload.resolved)
            rows += numerics_rows(planned, arm, profiled)
        rows += numerics_rows(planned, arm, numerics)  # refuses a figure that is none
    except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the sweep goes on
        resolved, cause = resolved | about(error), cause_of(error, Cause.BUILD)
        rows.append(row(planned, name, status_of(cause), "", resolved, _words(error), cause=cause))
        _note(error)
        return None
    if not numerics.ok:
        why, cause = f"numerics: {numerics.reason}", numerics.cause
        rows.append(row(planned, name, "failed", workload.metric, resolved, why, cause=cause))
        return None
    return arm


def _compile(planned: PlannedCase, arm: PreparedArm, setting: How, timer: Timer) -> list[Measurement]:
    """The first call of a compiled arm, timed apart from all others; again with warm caches where it can be."""
    compiling.prime(setting.device)
    work = arm.workload
    cold = work.recompile is not None or setting.in_turns  # or what one side compiled, the other would find
    with compiling.empty_caches() if cold else nullcontext():
        watch = compiling.CompileWatch()
        seconds = _first_call(work, timer)
        arm.resolved.update(watch.summary())
        fault = watch.fault()
        if fault:
            return [row(planned, arm.name, "failed", work.metric, arm.resolved, fault, cause=Cause.COMPILE)]
        rows = [row(planned, arm.name, "ok", "compile_s", arm.resolved, samples=(seconds,))]
        if work.recompile is not None and setting.warm_compile:
            work.recompile()
            seconds = _first_call(work, timer)
            again = row(planned, arm.name, "ok", "compile_s", arm.resolved, samples=(seconds,))
            rows.append(replace(again, part="warm"))
    return rows


def _operators(work: Workload) -> int:
    """How many operators one call hands to PyTorch's dispatcher: a count that no machine changes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # no one compiles inside, and to be skipped costs the import of Dynamo: 1.4 s

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    if isinstance(work.run, Rotation):
        work.run()  # which makes its operands
    with work.held(), Counter() as counter:
        work.run()
    return counter.calls


def _unfinished_ms(fn: Callable[[], object], timer: Timer) -> float:
    """For how long the whole device works on once a call has returned: events of one stream don't see another one."""
    timer.synchronize()
    fn()
    returned = time.perf_counter()
    timer.synchronize()
    return 1e3 * (time.perf_counter() - returned)


def _first_call(work: Workload, timer: Timer) -> float:
    """Seconds of a call that compiles."""
    with work.held():
        started = time.perf_counter()
        work.run()
        timer.synchronize()
        return time.perf_counter() - started


def allocate(notify: OnStage, arm: str) -> None:
    """Make the memory of a resident arm."""
    held = _held[arm]
    assert held.work.resident is not None
    held.memory.enter_context(held.work.resident())


def release(notify: OnStage, arm: str, device: str) -> None:
    """Free it, for the other processes too."""
    _held[arm].memory.close()
    if device == "cuda":
        release_memory()


def call(notify: OnStage, arm: str, closure: str, times: int) -> None:
    """Call a closure, and wait for the device."""
    fn = _held[arm].closure(closure)
    for _ in range(times):
        fn()
    _held[arm].timer.synchronize()


def sample(
    notify: OnStage,
    arm: str,
    closure: str,
    way: str,
    n: int,
    calls: int,
    lead: int,
    on_host: bool,
    rotating: bool,
    split: bool,
) -> dict[str, Any]:
    """n samples as `harness.timing.timers.Timer` takes them. What the calls have started and left running is ended.

    Args:
        notify: not used.
        arm: which.
        closure: see `_Held.closure`.
        way: "block" or "back_to_back".
        n: samples.
        calls: of each sample.
        lead: untimed calls before.
        on_host: by the host's clock.
        rotating: without a flush.
        split: up to the arm's mark as well.
    """
    held = _held[arm]
    timer: Timer | None = CpuTimer() if on_host else held.timer
    timer = timer.rotating() if rotating and timer is not None else timer
    assert timer is not None
    fn = held.closure(closure)
    before, stops, waited, began = children(), len(continued), waited_s(), time.perf_counter()
    place = _place(held.device)
    try:
        for _ in range(lead):
            fn()
        # Nothing is in flight after a call on the host; after a step of ranks their next collectives may be
        has_ended = isinstance(timer, RanksTimer) or type(timer).synchronize is CpuTimer.synchronize
        unfinished_ms = 0.0 if has_ended else _unfinished_ms(fn, timer)
        marks = {"split": held.work.split} if split else {}
        with timer.annotate(arm):
            samples = held.take(closure, getattr(timer, way), n, calls, **marks)
        held.unfinished_ms = min(held.unfinished_ms, unfinished_ms - 2 * max(samples))
        waits = waited_s() - waited > WAITED * (time.perf_counter() - began)
    finally:
        end_children(before)
    if _place(held.device) != place:
        held.fault = "it left another device or stream current: the clock is that of another", Cause.TAMPERED
    disturbed = "stopped" if len(continued) > stops else "contended" if waits else ""
    half = held.work.split.samples_ms if split else []
    return {"samples": samples, "late": timer.late, "split": half, "disturbed": disturbed}


def _place(device: str) -> tuple[int, ...]:
    """The current device and stream."""
    if device == "cpu":
        return ()
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def finish(notify: OnStage, arm: str) -> dict[str, Any]:
    """Why the times of an arm do not count, with its cause, and what its workload has found meanwhile.

    What the compiler did since it was first timed fails arms that are compiled.
    """
    held = _held[arm]
    compiled = held.watch.steady_fault() if held.work.compiled else ""
    fault, cause = (compiled, Cause.COMPILE) if compiled else held.unproven()
    return {"fault": fault, "cause": cause, "resolved": held.work.resolved}


def trial(notify: OnStage, planned: PlannedCase, arm: str, device: str, workspace: Path) -> dict[str, Any]:
    """Make a run of a trial suite to its end."""
    suite, last, trace = planned.suite, 0.0, ""
    assert isinstance(suite, TrialSuite)
    begin_alike(planned.case.seed)

    def on_step(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            notify(Steps(done, total))

    try:
        made = suite.trial(planned.case, arm, device, workspace, on_step)
    except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the other runs go on
        trace = "".join(traceback.format_exception(error))[-4000:]
        made = TrialOutcome((), failure=_words(error), cause=cause_of(error, Cause.RUN))
        _note(error)
    return {
        "series": [
            [s.metric, [float(x) for x in s.samples], [int(n) for n in s.steps], s.part] for s in made.series
        ],
        "resolved": made.resolved,
        "failure": made.failure,
        "refusal": made.refusal,
        "cause": made.cause,
        "trace": trace,
    }


_PLACES = (torch, nn.functional, nn.Module, nn.Linear, torch.Tensor, torch.autograd.Function)
_HOOKS = [
    hooks for name, hooks in vars(module).items() if name.startswith("_global_") and isinstance(hooks, dict)
]
# Replaced by torch itself when its compiler is imported, or compiles for the first time
_BY_TORCH = {"manual_seed", "__init__", "__setstate__"}
_FIRST = {
    (place, name): value
    for place in _PLACES
    for name, value in vars(place).items()
    if callable(value) and name not in _BY_TORCH
}
_KERNELS = frozenset(library._impls)
_seen: list[str] = []  # what `replaced` said before the first arm


_TIMES = (time, torch.cuda, torch.cuda.Event, torch.cuda.Stream, HostClock, EventClock, CpuTimer, CudaTimer)
_CLOCKS = {(place, name): value for place in _TIMES for name, value in vars(place).items() if callable(value)}


def changed(first: Mapping[tuple[Any, str], object]) -> list[str]:
    """What is no longer what it was."""
    return [f"{p.__name__}.{name}" for (p, name), value in first.items() if vars(p).get(name) is not value]


def replaced() -> str:
    """What has been replaced in PyTorch since this file was imported, before any suite; "" for nothing."""
    found = changed(_FIRST)
    found += ["operators"] if any(key.startswith("aten/") for key in library._impls - _KERNELS) else []
    return ", ".join(found + (["module hooks"] if any(_HOOKS) else []))
