"""Remote calls: what the process of a remote arm does (`harness.engine.remote_arm`), one call at a time."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.engine.preparing import prepare as prepare_here
from harness.engine.process_state import differences, restore, take
from harness.store.cause import Cause
from harness.store.errors import RemoteError, SpoiledError, cause_of, one_line
from harness.timing import compiling
from harness.timing.timers import CpuTimer, Timer, release_memory, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.engine.bench import Setting
    from harness.engine.plan import PlannedCase
    from harness.engine.process_state import Snapshot
    from harness.engine.rows import PreparedArm
    from harness.store.measurement import Measurement

# Of a workload, what another process can be given as it is
PLAIN = ("metric", "flops", "bytes_moved", "compiled", "on_host", "tokens", "split_metric", "unmetered")
LISTS = ("covering", "variants")  # of closures


class Failure(NamedTuple):
    """The answer to a call that raised."""

    reason: str
    cause: Cause


class Facts(NamedTuple):
    """An arm that may be timed, without its closures.

    Attributes:
        resolved: what really runs.
        plain: fields of its workload by name, those of `PLAIN`.
        lengths: of its lists of closures, those of `LISTS`.
        resident: its memory is made for each block.
        marks_split: its closure marks a point within.
    """

    resolved: dict[str, object]
    plain: dict[str, Any]
    lengths: dict[str, int]
    resident: bool
    marks_split: bool


class Prepared(NamedTuple):
    """The answer to `prepare`; `facts` is None where the arm may not be timed, as the last row says."""

    rows: list[Measurement]
    facts: Facts | None
    changed: dict[str, list[str]]
    process: int


class Taken(NamedTuple):
    """The answer to `sample`: milliseconds of each sample, and up to the arm's mark; samples that may hold gaps."""

    samples: list[float]
    split: list[float]
    late: int


class _Held:
    """The arm of this process."""

    def __init__(self, arm: PreparedArm, timer: Timer) -> None:
        self.work, self.timer = arm.workload, timer
        self.memory = ExitStack()
        self.watch = compiling.CompileWatch()
        self._turns: dict[str, Callable[[], object]] = {"run": arm.workload.run}

    def closure(self, name: str) -> Callable[[], object]:
        """`run`, or the closures of a list in turns, which keep their place between two calls."""
        if name not in self._turns:
            closures: Sequence[Callable[[], object]] = tuple(getattr(self.work, name)) or (self.work.run,)
            turns = itertools.cycle(closures)
            self._turns[name] = lambda: next(turns)()
        return self._turns[name]


_held: list[_Held] = []  # one, once it is prepared


def answer(fn: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or a `Failure`: an exception may be of a class that the other process cannot make."""
    try:
        return fn(*args)
    except Exception as error:  # noqa: BLE001 - whatever an arm raises becomes its row
        return Failure(one_line(error), cause_of(error, Cause.RUN))


def prepare(planned: PlannedCase, name: str, setting: Setting, state: Snapshot) -> Prepared:
    """Build, compile and check the arm, from the state in which the other arms begin."""
    timer = timer_for(setting.device)  # before the state: a GPU's generators are there once it is in use
    restore(state, take())
    before = take()
    rows: list[Measurement] = []
    try:
        arm = prepare_here(planned, name, setting, timer, rows)
    except SpoiledError:
        arm = None
    changed = differences(before, take())
    if arm is None:
        return Prepared(rows, None, changed, os.getpid())
    work = arm.workload
    if work.timer is not None:
        raise RemoteError(
            "its work is done by ranks, which it cannot command from a process of its own", Cause.BUILD
        )
    _held[:] = [_Held(arm, timer)]
    facts = Facts(
        arm.resolved,
        {field: getattr(work, field) for field in PLAIN},
        {field: len(getattr(work, field)) for field in LISTS},
        work.resident is not None,
        work.split is not None,
    )
    return Prepared(rows, facts, changed, os.getpid())


def enter() -> None:
    """Make the memory of a resident arm."""
    held = _held[0]
    assert held.work.resident is not None
    held.memory.enter_context(held.work.resident())


def leave(device: str) -> None:
    """Free it, for the other processes too."""
    _held[0].memory.close()
    if device == "cuda":
        release_memory()


def call(closure: str, times: int) -> None:
    """Call a closure, and wait for the device."""
    held = _held[0]
    fn = held.closure(closure)
    for _ in range(times):
        fn()
    held.timer.synchronize()


def sample(
    closure: str, way: str, n: int, calls: int, lead: int, on_host: bool, rotating: bool, split: bool
) -> Taken:
    """n samples as `harness.timing.timers.Timer` takes them.

    Args:
        closure: see `_Held.closure`.
        way: "block" or "back_to_back".
        n: samples.
        calls: of each sample.
        lead: untimed calls before.
        on_host: by the host's clock.
        rotating: without a flush.
        split: up to the arm's mark as well.
    """
    held = _held[0]
    timer: Timer | None = CpuTimer() if on_host else held.timer
    if rotating:
        timer = held.timer.rotating()
        assert timer is not None
    assert timer is not None
    fn = held.closure(closure)
    for _ in range(lead):
        fn()
    if way == "block":
        return Taken(timer.block(fn, n, calls), [], timer.late)
    if not split:
        return Taken(timer.back_to_back(fn, n, calls), [], timer.late)
    mark = held.work.split
    return Taken(timer.back_to_back(fn, n, calls, split=mark), list(mark.samples_ms), timer.late)


def finish() -> tuple[str, dict[str, object]]:
    """What the compiler did since the arm was ready, and what its workload has found meanwhile."""
    return _held[0].watch.steady_fault(), dict(_held[0].work.resolved)
