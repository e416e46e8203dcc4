"""The process of an arm: what it is asked to do, one call at a time (`harness.engine.arms`).

It lives for the whole sweep and does the blocks of one arm, so that nothing an arm sets or breaks reaches another one. All that
it answers is JSON: an object that a suite put into a row becomes its text here and is never made anew in the parent.
With `isolate=false` the same calls are made in the command's own process, and arms share what belongs to a process.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import library, nn
from torch.nn.modules import module

from harness.engine import process_state
from harness.engine.rows import PreparedArm, about, numerics_rows, row
from harness.engine.stages import Stage, StageKind, Steps
from harness.machine import fork_server
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
from harness.store.errors import Cause, RemoteError, SpoiledError, cause_of, one_line
from harness.timing import compiling
from harness.timing.timers import CpuTimer, Timer, release_memory, timer_for
from harness.timing.workload import Suite, Trial, TrialSuite

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from harness.engine.bench import Setting
    from harness.engine.plan import PlannedCase
    from harness.store.measurement import Measurement
    from harness.timing.workload import Workload

Tell = Callable[[Stage | Steps], None]

REPORT_S = 0.2  # between two messages about the steps of one run
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

# A suite is a module, which does not pickle; its name does.
ForkingPickler.register(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


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
        """Those of this process; `variables` are added to its environment."""
        environ = {**os.environ, **(variables or {})}
        return cls(environ, str(Path.cwd()), torch.get_num_threads(), memory_bytes)


def serve(parent: Connection, output: Connection, conditions: Conditions) -> None:
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
    gc.freeze()  # what the server made is never garbage; looking through it would copy its pages
    os.environ.clear()
    os.environ.update(conditions.environ)
    os.chdir(conditions.folder)
    if conditions.memory_bytes is not None:
        limit_memory(conditions.memory_bytes)
    torch.set_num_threads(conditions.threads)
    process_state.begin()

    def tell(sign: Stage | Steps) -> None:
        parent.send_bytes(json.dumps({type(sign).__name__: sign}).encode())

    while True:
        try:
            fn, args = parent.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # noqa: BLE001 - a suite that can be sent, and not be made anew here
            answer = _failed(error)
        else:
            answer = answered(fn, args, tell, BaseException)
        sys.stdout.flush()
        parent.send_bytes(answer)


def answered(fn: Callable[..., Any], args: tuple[Any, ...], tell: Tell, caught: Any) -> bytes:
    """What a call returns, or what it raised, as JSON."""
    try:
        return json.dumps({"result": plain(fn(tell, *args))}).encode()
    except caught as error:
        return _failed(error)


def _failed(error: BaseException) -> bytes:
    _note(error)
    return json.dumps({"failed": plain(one_line(error)), "cause": cause_of(error, Cause.RUN)}).encode()


def _note(error: BaseException) -> None:
    """Remembers what has left this process unfit for its device."""
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

    def __init__(self, work: Workload, timer: Timer) -> None:
        self.work, self.timer = work, timer
        self.memory = ExitStack()
        self._turns: dict[str, Callable[[], object]] = {"run": work.run}

    @functools.cached_property
    def watch(self) -> compiling.CompileWatch:
        """Counts what the compiler does from the first use on: then all arms of the case are ready."""
        return compiling.CompileWatch()

    def closure(self, name: str) -> Callable[[], object]:
        """`run`, or the closures of a list in turns, which keep their place between two calls."""
        _ = self.watch
        if name not in self._turns:
            turns = itertools.cycle(tuple(getattr(self.work, name)) or (self.work.run,))
            self._turns[name] = lambda: next(turns)()
        return self._turns[name]


_held: dict[str, _Held] = {}
_spoiled: list[str] = []
device_timer = functools.cache(timer_for)


def started_threads(tell: Tell) -> str:
    """See `harness.machine.fork_server`."""
    return fork_server.started_threads


def clear(tell: Tell, device: str) -> dict[str, Any]:
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


def prepare(tell: Tell, planned: PlannedCase, name: str, setting: Setting) -> dict[str, Any]:
    """Build, compile and check an arm; only one that is right may be timed.

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
    timer = device_timer(setting.device)
    begin_alike(planned.case.seed)
    rows: list[Measurement] = []
    arm = _prepared(tell, planned, name, setting, timer, rows)
    if setting.device == "cuda":
        release_memory()  # for the next arm, whose allocator is another
    sent = [{field: getattr(one, field) for field in SENT} for one in rows]
    if arm is None:
        return {"rows": sent, "facts": None}
    work = arm.workload
    _held[name] = _Held(work, work.timer or timer)
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
    tell: Tell, planned: PlannedCase, name: str, setting: Setting, timer: Timer, rows: list[Measurement]
) -> PreparedArm | None:
    suite, info = planned.suite, planned.suite.ARMS[name]
    assert isinstance(suite, Suite)
    resolved: dict[str, object] = {}
    try:
        workload = suite.build(planned.case, name, setting.device)
        resolved.update(workload.resolved)
        arm = PreparedArm(name, info.baseline, workload, resolved)
        if workload.compiled:
            tell(Stage(StageKind.COMPILE, name))
            rows += _compile(planned, arm, setting, timer)
            if rows[-1].status == "failed":
                return None
        tell(Stage(StageKind.CHECK, name))
        numerics = workload.check()
        resolved.update(workload.resolved)  # a check may learn what really ran
        if numerics.ok and workload.profile is not None and setting.folder is not None:
            profiled = workload.profile(setting.folder)
            resolved.update(workload.resolved)
            rows += numerics_rows(planned, arm, profiled)
        rows += numerics_rows(planned, arm, numerics)  # refuses a figure that is none
    except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the sweep goes on
        resolved, cause = resolved | about(error), cause_of(error, Cause.BUILD)
        rows.append(row(planned, name, "failed", "", resolved, one_line(error), cause=cause))
        _note(error)
        return None
    if not numerics.ok:
        why, cause = f"numerics: {numerics.reason}", numerics.cause
        rows.append(row(planned, name, "failed", workload.metric, resolved, why, cause=cause))
        return None
    return arm


def _compile(planned: PlannedCase, arm: PreparedArm, setting: Setting, timer: Timer) -> list[Measurement]:
    """The first call of a compiled arm, timed apart from all others; again with warm caches where it can be."""
    compiling.prime(setting.device)
    work = arm.workload
    with compiling.empty_caches() if work.recompile is not None else nullcontext():
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


def _first_call(work: Workload, timer: Timer) -> float:
    """Seconds of a call that compiles."""
    with work.held():
        started = time.perf_counter()
        work.run()
        timer.synchronize()
        return time.perf_counter() - started


def enter(tell: Tell, arm: str) -> None:
    """Make the memory of a resident arm."""
    held = _held[arm]
    assert held.work.resident is not None
    held.memory.enter_context(held.work.resident())


def leave(tell: Tell, arm: str, device: str) -> None:
    """Free it, for the other processes too."""
    _held[arm].memory.close()
    if device == "cuda":
        release_memory()


def call(tell: Tell, arm: str, closure: str, times: int) -> None:
    """Call a closure, and wait for the device."""
    fn = _held[arm].closure(closure)
    for _ in range(times):
        fn()
    _held[arm].timer.synchronize()


def sample(
    tell: Tell,
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
        tell: not used.
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
    try:
        for _ in range(lead):
            fn()
        marks = {"split": held.work.split} if split else {}
        with timer.annotate(arm):
            samples = getattr(timer, way)(fn, n, calls, **marks)
        waits = waited_s() - waited > WAITED * (time.perf_counter() - began)
    finally:
        end_children(before)
    disturbed = "stopped" if len(continued) > stops else "contended" if waits else ""
    half = held.work.split.samples_ms if split else []
    return {"samples": samples, "late": timer.late, "split": half, "disturbed": disturbed}


def finish(tell: Tell, arm: str) -> dict[str, Any]:
    """What the compiler did since the arm was first timed, and what its workload has found meanwhile."""
    return {"fault": _held[arm].watch.steady_fault(), "resolved": _held[arm].work.resolved}


def trial(tell: Tell, planned: PlannedCase, arm: str, device: str, workspace: Path) -> dict[str, Any]:
    """Make a run of a trial suite to its end."""
    suite, last, trace = planned.suite, 0.0, ""
    assert isinstance(suite, TrialSuite)
    begin_alike(planned.case.seed)

    def on_step(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            tell(Steps(done, total))

    try:
        made = suite.trial(planned.case, arm, device, workspace, on_step)
    except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the other runs go on
        trace = "".join(traceback.format_exception(error))[-4000:]
        made = Trial((), failure=one_line(error), cause=cause_of(error, Cause.RUN))
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


def replaced() -> str:
    """What has been replaced in PyTorch since this file was imported, before any suite; "" for nothing."""
    found = [f"{p.__name__}.{name}" for (p, name), value in _FIRST.items() if vars(p).get(name) is not value]
    found += ["operators"] if any(key.startswith("aten/") for key in library._impls - _KERNELS) else []
    return ", ".join(found + (["module hooks"] if any(_HOOKS) else []))
