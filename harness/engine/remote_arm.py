"""Remote arms: those that have a process of their own, because they change what no process can put back.

The process lives for the whole case and does what it is told a block at a time (`harness.machine.ranks.Gang`), so that its
arm stays in the same rounds, in random order, as the arms that share this process: ratios stay paired. It takes its samples
itself, by the same timers; no message is in a sample. Where both compute on one GPU, one of them is idle at any time, and
the memory of both has to fit: what this process's allocator keeps in reserve is released before the other one builds.

A remote arm whose process dies fails alone. One that hangs is this process's silence (`harness.engine.workers`), which names
the arm that was under way and measures the others again.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.engine import remote_calls, worker_process
from harness.engine.process_state import portable
from harness.engine.rows import PreparedArm, row
from harness.machine.ranks import Gang, RanksError
from harness.store.cause import Cause
from harness.store.errors import RemoteError, cause_of, one_line
from harness.timing.clock import Split
from harness.timing.timers import release_memory
from harness.timing.workload import Numerics, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from harness.engine.bench import Setting
    from harness.engine.plan import PlannedCase
    from harness.engine.process_state import OwnStates, Snapshot
    from harness.machine.gpu_monitor import Monitor
    from harness.store.measurement import Measurement
    from harness.timing.timers import Timer

LIMIT_S = 1e6  # a hang is judged by whoever waits for this process
DECLARED: Mapping[str, object] = {"why": "declared"}


def moved_for(left: Mapping[str, object]) -> Mapping[str, object]:
    """Why an arm has a process of its own that changed what another one could not put back, for `resolved`."""
    return {"why": "changed", "settings": left}


def declared(planned: PlannedCase, arm: str) -> Mapping[str, object] | None:
    """`DECLARED` where the arm's peer asks for a process of its own."""
    owner = planned.suite.ARMS[arm].peer
    if not owner:
        return None
    from harness.peers import PEERS

    return DECLARED if owner in PEERS and PEERS[owner].own_process else None


class RemoteArm:
    """One arm in a process of its own, which ends with `close`.

    Args:
        planned: the case.
        name: of the arm.
        setting: how cases are measured.
        why: for `resolved`.

    Attributes:
        rows: of the arm up to its timing.
        changed: what it has set in its process.
        process: its id; 0 where there is none.
        arm: what is timed; None where it may not be, as the last row says.
    """

    def __init__(
        self, planned: PlannedCase, name: str, setting: Setting, state: Snapshot, why: Mapping[str, object]
    ) -> None:
        self._device, self._fault, self.process = setting.device, "", 0
        self._gang: Gang | None = None
        self.changed: dict[str, list[str]] = {}
        self.arm: PreparedArm | None = None
        own: dict[str, object] = {"own_process": why}
        if self._device == "cuda":
            release_memory()
        try:
            self._gang = self._started()
            made: remote_calls.Prepared = self.ask(
                remote_calls.prepare, planned, name, setting, portable(state)
            )
        except Exception as error:  # noqa: BLE001 - a suite that cannot be sent, too, costs this arm alone
            cause = cause_of(error, Cause.BUILD)
            self.rows = [row(planned, name, "failed", "", own, one_line(error), cause=cause)]
            return
        self.process = made.process
        own = {"own_process": {**why, "process": made.process}}
        self.rows = [replace(r, resolved={**r.resolved, **own}) for r in made.rows]
        self.changed = made.changed
        if made.facts is not None:
            resolved = {**made.facts.resolved, **own}
            self.arm = PreparedArm(
                name, planned.suite.ARMS[name].baseline, self._workload(made.facts, resolved), resolved
            )

    def _started(self) -> Gang:
        first = worker_process.wire(remote_calls.prepare)
        with self._told():
            return Gang(1, self._device, first=first, group=False)

    def _workload(self, facts: remote_calls.Facts, resolved: dict[str, object]) -> Workload:
        given: dict[str, Any] = {
            name: (RemoteClosure(self, name),) * length for name, length in facts.lengths.items()
        }
        return Workload(
            run=RemoteClosure(self, "run"),
            check=_checked,
            resolved=resolved,
            resident=self._resident if facts.resident else None,
            split=Split() if facts.marks_split else None,
            **given,
            **facts.plain,
        )

    def ask(self, fn: Callable[..., Any], *args: Any, meanwhile: Callable[[], object] | None = None) -> Any:
        """What `fn(*args)` returns in the arm's process.

        Raises:
            RemoteError: it raised there, or the process is gone.
        """
        if self._fault or self._gang is None:
            raise RemoteError(self._fault, Cause.DIED)
        work = worker_process.wire((remote_calls.answer, (fn, *args)))
        with self._told():
            [answer] = self._gang.do(work, LIMIT_S, meanwhile)
        if isinstance(answer, remote_calls.Failure):
            raise RemoteError(answer.reason, answer.cause)
        return answer

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RanksError as error:
            self._fault = f"its own process {error.words}"
            raise RemoteError(self._fault, Cause.DIED) from error

    @contextmanager
    def _resident(self) -> Iterator[None]:
        if self._device == "cuda":
            release_memory()
        self.ask(remote_calls.enter)
        try:
            yield
        finally:
            with suppress(RemoteError):  # a fault was raised where it happened
                self.ask(remote_calls.leave, self._device)

    def finish(self) -> str:
        """What the compiler did since the arm was ready; takes in what its workload has found meanwhile."""
        try:
            fault, resolved = self.ask(remote_calls.finish)
        except RemoteError as error:  # a timing that failed by it has its own words for it
            return f"what the compiler did while it was timed is not known: {one_line(error)}"
        assert self.arm is not None
        assert isinstance(self.arm.workload.resolved, dict)
        self.arm.workload.resolved.update(resolved)
        return str(fault)

    def close(self) -> None:
        """End the process."""
        if self._gang is not None:
            self._gang.close()


@dataclass(slots=True, eq=False)
class RemoteClosure:
    """A closure of a remote arm. A call is queued, and made with the next samples or when somebody waits for the device."""

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
            self.arm.ask(remote_calls.call, self.name, queued)


class RemoteArms:
    """The remote arms of one case; a context manager, which ends their processes.

    Args:
        planned: the case.
        setting: how cases are measured.
        apart: arms that are remote, each with the reason, beside those of peers that ask for it.
        monitor: of the GPU, for which their processes are no strangers; None on a CPU.
    """

    def __init__(
        self,
        planned: PlannedCase,
        setting: Setting,
        apart: Mapping[str, Mapping[str, object]],
        monitor: Monitor | None = None,
    ) -> None:
        self._planned, self._setting, self._monitor = planned, setting, monitor
        asked = {name: why for name in planned.runnable if (why := declared(planned, name))}
        self._why = {**asked, **apart}
        self._arms: dict[str, RemoteArm] = {}

    def __enter__(self) -> RemoteArms:
        return self

    def __exit__(self, *_: object) -> None:
        for arm in self._arms.values():
            arm.close()
        self._arms.clear()
        self._share()

    def _share(self) -> None:
        if self._monitor is not None and self._why:
            self._monitor.share_with([arm.process for arm in self._arms.values() if arm.arm is not None])

    def __contains__(self, name: object) -> bool:
        return name in self._why

    def prepare(self, name: str, states: OwnStates, rows: list[Measurement]) -> PreparedArm | None:
        """Start an arm's process, and build, compile and check the arm there.

        Args:
            name: of the arm.
            states: of this process; the other one begins as this one is, and what the arm changes there is noted.
            rows: gets the arm's rows up to its timing.

        Returns:
            None where the arm may not be timed; its last row says why.
        """
        remote = self._arms[name] = RemoteArm(
            self._planned, name, self._setting, states.base, self._why[name]
        )
        rows += remote.rows
        if remote.changed:
            states.changed[name] = remote.changed
        if remote.arm is None:
            remote.close()
        self._share()
        return remote.arm

    def timer(self, here: Timer, on_host: bool) -> Timer:
        """The timer for all arms of the case: `here` where none is remote."""
        arms = [remote.arm for remote in self._arms.values() if remote.arm is not None]
        runs = [run for arm in arms if isinstance(run := arm.workload.run, RemoteClosure)]
        return RemoteTimer(here, runs, on_host) if runs else here

    def steady_faults(self) -> dict[str, str]:
        """What the compiler did in the process of each remote arm since it was ready."""
        return {name: remote.finish() for name, remote in self._arms.items() if remote.arm is not None}


class RemoteTimer:
    """A timer for arms of this process, and for remote ones, whose process has one of its own kind.

    Args:
        here: of this process.
        closures: those that may have calls queued.
        rotating: see `harness.timing.timers.Timer`.
        on_host: time by the host's clock.
    """

    def __init__(
        self, here: Timer, closures: list[RemoteClosure], on_host: bool = False, rotating: bool = False
    ) -> None:
        self._here, self._closures, self._on_host, self._rotating = here, closures, on_host, rotating
        self.method, self.l2, self.resolution_ms = here.method, here.l2, here.resolution_ms
        self.hold, self.late = here.hold, 0

    def block(
        self, fn: Callable[[], object], n: int, calls: int = 1, probe: Callable[[], None] | None = None
    ) -> list[float]:
        """See `Timer`."""
        if isinstance(fn, RemoteClosure):
            return self._remote(fn, "block", n, calls, probe, None)
        samples = self._here.block(fn, n, calls, probe)
        self.late = self._here.late
        return samples

    def back_to_back(
        self,
        fn: Callable[[], object],
        n: int,
        calls: int = 1,
        probe: Callable[[], None] | None = None,
        split: Split | None = None,
    ) -> list[float]:
        """See `Timer`."""
        if isinstance(fn, RemoteClosure):
            return self._remote(fn, "back_to_back", n, calls, probe, split)
        samples = self._here.back_to_back(fn, n, calls, probe, split)
        self.late = self._here.late
        return samples

    def _remote(
        self,
        fn: RemoteClosure,
        way: str,
        n: int,
        calls: int,
        probe: Callable[[], None] | None,
        split: Split | None,
    ) -> list[float]:
        how = (fn.name, way, n, calls, fn.take_queued(), self._on_host, self._rotating, split is not None)
        taken: remote_calls.Taken = fn.arm.ask(remote_calls.sample, *how, meanwhile=probe)
        self.late = taken.late
        if split is not None:
            split.samples_ms = taken.split
        return taken.samples

    def rotating(self) -> RemoteTimer | None:
        """See `Timer`."""
        here = self._here.rotating()
        return None if here is None else RemoteTimer(here, self._closures, self._on_host, rotating=True)

    def synchronize(self) -> None:
        """See `Timer`."""
        self._here.synchronize()
        for closure in self._closures:
            closure.wait()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """See `Timer`."""
        return self._here.annotate(name)


def _checked() -> Numerics:
    raise AssertionError("a remote arm was checked in its own process")
