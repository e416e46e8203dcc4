"""Bench: measures one case in this process, all its arms, and turns what happens into rows.

Within a case the order is fixed: build every arm, compile (timed apart), check the numerics, and only then time the arms
that are right, interleaved. An arm that cannot be built, is wrong, or recompiles while it is timed ends as a `failed` row
with its reason; the other arms go on. One that takes the device with it ends the case in this process; so does one that
changes the process for good, unless it has a process of its own (`harness.engine.remote_arm`).
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.engine import replaced
from harness.engine.preparing import prepare
from harness.engine.process_state import OwnStates
from harness.engine.remote_arm import RemoteArms
from harness.engine.rows import (
    PreparedArm,
    all_arms,
    energy_row,
    partial_row,
    row,
    skipped_rows,
    split_row,
    time_row,
    with_changes,
)
from harness.engine.stages import Stage, StageKind
from harness.machine import environment
from harness.store.arm import control_name, original_name
from harness.store.cause import Cause
from harness.store.errors import SpoiledError, cause_of, one_line
from harness.timing import compiling
from harness.timing.rounds import Timer, TimingConfig, measure, measure_sustained, timer_for
from harness.timing.timers import release_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from harness.engine.plan import PlannedCase
    from harness.store.measurement import Measurement
    from harness.timing.rounds import Timing


@dataclass(frozen=True, slots=True)
class Setting:
    """How cases are measured, wherever that is.

    Attributes:
        device: "cpu" or "cuda".
        timing: warm-up, rounds and stop rule.
        seed: of the order of the arms within the rounds.
        control: time each baseline twice (A/A).
        warm_compile: compile a second time, from the caches that the first one filled.
        folder: of the run, for files that belong to rows (traces).
    """

    device: str
    timing: TimingConfig
    seed: int = 0
    control: bool = True
    folder: Path | None = None
    warm_compile: bool = True


class ArmFaultError(RuntimeError):
    """An arm took the device with it: this process can measure nothing more.

    Attributes:
        arm: which.
        rows: its own; the last one says what it died of.
    """

    def __init__(self, arm: str, rows: list[Measurement]) -> None:
        super().__init__(f"arm {arm} lost the device: {rows[-1].reason}")
        self.arm, self.rows = arm, rows


class ChangedProcessError(ArmFaultError):
    """An arm has changed what its process cannot put back: it can be measured in a process of its own.

    Attributes:
        left: what it changed, see `harness.engine.process_state.differences`.
    """

    def __init__(self, arm: str, rows: list[Measurement], left: Mapping[str, object]) -> None:
        super().__init__(arm, rows)
        self.left = left


class Bench:
    """Measures cases on one device, in this process.

    Args:
        setting: how.
        timer: how one block of calls is timed.
        monitor: reads clocks, power and throttling of the GPU; None on a CPU.
    """

    def __init__(self, setting: Setting, timer: Timer, monitor: Any = None) -> None:
        self.setting, self._timer, self._monitor = setting, timer, monitor
        self._spoiled = ""

    def measure(
        self,
        planned: PlannedCase,
        *,
        sustained: bool = False,
        apart: Mapping[str, Mapping[str, object]] | None = None,
        on_sign: Callable[[str], None] = lambda what: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
        on_arm: Callable[[str], None] = lambda arm: None,
        on_rows: Callable[[list[Measurement]], None] | None = None,
    ) -> list[Measurement]:
        """All rows of one case; a fault outside of any one arm (a suite's bug, a dead device) fails all its arms.

        Args:
            planned: the case.
            sustained: under sustained load as well.
            apart: arms that get a process of their own, each with the reason; those of peers that ask for one do anyway.
            on_sign: called with what begins, as a sign of life.
            on_stage: called at the start of each stage, for people who wait.
            on_arm: called with the name of the current arm, also before each of its timed blocks; "" for none.
            on_rows: given all rows so far between two rounds, those of times as `partial`.

        Raises:
            ArmFaultError: an arm took the device with it.
            ChangedProcessError: an arm changed this process for good.
        """
        try:
            with RemoteArms(planned, self.setting, apart or {}, self._monitor) as remote:
                return self._measure(planned, sustained, remote, on_sign, on_stage, on_arm, on_rows)
        except ArmFaultError:
            raise
        except Exception as error:  # noqa: BLE001 - the other cases of the sweep go on
            return all_arms(planned, "failed", one_line(error), cause_of(error, Cause.ERROR))

    @contextmanager
    def own_state(self, arm: str) -> Iterator[OwnStates]:
        """The process as it is now, for a run that nothing shares it with; after one that changes it for good it is spoiled."""
        states = OwnStates()
        with states.of(arm):
            yield states
        if states.culprit:
            self._spoiled = f"arm {arm} {states.reason}"

    def lost(self, *, release: bool = True) -> str:
        """Why this process can use its device no more; "" where it can. After a CUDA fault every later call fails.

        Args:
            release: a device that is well gets back what no arm holds any more.
        """
        if self._spoiled:
            return self._spoiled
        try:
            self._timer.synchronize()
            if release and self.setting.device == "cuda":
                release_memory()
        except RuntimeError as error:
            return one_line(error)
        return ""

    def _measure(
        self,
        planned: PlannedCase,
        sustained: bool,
        remote: RemoteArms,
        on_sign: Callable[[str], None],
        on_stage: Callable[[Stage], None],
        on_arm: Callable[[str], None],
        on_rows: Callable[[list[Measurement]], None] | None,
    ) -> list[Measurement]:
        device, timing, seed = self.setting.device, self.setting.timing, self.setting.seed
        if changed := replaced.before_arms():
            why = (
                f"{changed} of PyTorch or Python changed before any arm was built, so that no arm would be what it is called: "
                "an extension may change it in the functions of its peer alone, with own_process=True"
            )
            return all_arms(planned, "failed", why, Cause.ERROR)
        rows = skipped_rows(planned)
        compiling.reset()
        if device == "cuda":
            release_memory()
        states = OwnStates()
        arms: dict[str, PreparedArm] = {}
        for name in planned.runnable:
            # In this order: it raises where the arm before has closed the pipe, and that one is still under way.
            on_sign("it was begun")
            on_arm(name)
            if name in remote:
                on_stage(Stage(StageKind.BUILD, name))
                arm = remote.prepare(name, states, rows)
            else:
                with states.of(name):
                    arm = self._prepare(planned, name, rows, on_stage)
                self._refuse_changed(states, planned, rows)
            if arm is not None:
                arms[name] = arm
            elif self.lost():  # if not, what this arm held is there for the next one: no frame holds it now
                raise ArmFaultError(name, [r for r in rows if r.arm == name])
        on_sign("timing began")
        on_arm("")
        if self.setting.control:
            baselines = {arm.baseline or arm.name for arm in arms.values()}
            for name in [name for name in arms if name in baselines]:
                control = control_name(name)
                arms[control] = replace(arms[name], name=control, baseline=name)
        closures = {name: arm.workload.run for name, arm in arms.items()}
        # Events would see a launch cost only where the device waits for the host.
        on_host = any(arm.workload.on_host for arm in arms.values())
        timer = timer_for("cpu") if on_host else self._timer
        timer = next((arm.workload.timer for arm in arms.values() if arm.workload.timer is not None), timer)
        timer = remote.timer(timer, on_host)
        blocks = _Blocks(on_arm, lambda: self.lost(release=False), timer)
        resident = {n: partial(blocks.of, n, r) for n, a in arms.items() if (r := a.workload.resident)}
        on_stage(Stage(StageKind.WARM_UP))
        before = environment.snapshot(self._monitor)
        watch = compiling.CompileWatch()

        def around(name: str) -> AbstractContextManager[None]:
            arm = original_name(name)
            return nullcontext() if arm in remote else states.of(arm)

        def time_rows(timings: Iterable[tuple[str, Timing]]) -> list[Measurement]:
            # Dynamo counts by process, so a recompile can't be laid on one arm: every compiled arm of the case fails.
            recompiled = dict.fromkeys(arms, watch.steady_fault()) | remote.steady_faults()
            state = {"before": before, "after": environment.snapshot(self._monitor)}
            return [
                found
                for name, timed in timings
                for found in _rows_of(
                    planned, arms[name], timed, recompiled[original_name(name)], state, device
                )
            ]

        def keep(timings: Mapping[str, Timing]) -> None:
            on_arm("")
            if on_rows is not None and not blocks.culprit and not states.culprit:
                partial_rows = (partial_row(r, timing.min_rounds) for r in time_rows(timings.items()))
                on_rows(with_changes([*rows, *partial_rows], states.changed))

        timings = list(
            measure(
                closures,
                timer,
                timing,
                seed,
                self._monitor,
                annotate=blocks.range_of,
                resident=resident,
                on_warm=lambda: on_stage(Stage(StageKind.TIME)),
                on_round=None if on_rows is None else keep,
                splits={name: arm.workload.split for name, arm in arms.items() if arm.workload.split},
                rotations={
                    name: arm.workload.covering for name, arm in arms.items() if arm.workload.covering
                },
                around=around,
            ).items()
        )
        if sustained and not resident and not blocks.culprit:  # a resident arm is under its own load already
            keep(dict(timings))
            on_sign("timing under load began")
            on_stage(Stage(StageKind.SUSTAIN))
            # Listed first: making the copies takes memory and time that no timed call may spend.
            rotating = {n: tuple(a.workload.variants) or (a.workload.run,) for n, a in arms.items()}
            timings += measure_sustained(
                rotating, timer, timing, seed, self._monitor, annotate=blocks.range_of, around=around
            ).items()
        on_arm("")
        if name := blocks.culprit:
            work, resolved = arms[name].workload, arms[name].resolved
            why, cause = blocks.reason, blocks.cause
            rows.append(row(planned, name, "failed", work.metric, resolved, why, cause=cause))
            raise ArmFaultError(name, [r for r in rows if r.arm == name])
        self._refuse_changed(states, planned, rows)
        return with_changes(rows + time_rows(timings), states.changed)

    def _refuse_changed(self, states: OwnStates, planned: PlannedCase, rows: list[Measurement]) -> None:
        """Ends a case whose process an arm has changed for good: the others are timed in another one.

        Raises:
            ChangedProcessError: names the arm.
        """
        if name := states.culprit:
            self._spoiled = f"arm {name} {states.reason}"
            own = [r for r in rows if r.arm == name and r.status != "ok"]
            why = f"it {states.reason}; with isolate=true it is measured in a process of its own"
            failed = row(planned, name, "failed", reason=why)
            raise ChangedProcessError(name, with_changes([*own, failed], states.changed), states.left)

    def _prepare(
        self, planned: PlannedCase, name: str, rows: list[Measurement], on_stage: Callable[[Stage], None]
    ) -> PreparedArm | None:
        try:
            return prepare(planned, name, self.setting, self._timer, rows, on_stage)
        except SpoiledError as error:
            self._spoiled = one_line(error)
            return None


class _Blocks:
    """The timed blocks of all arms: tells whose it is, and finds the one in which the device was lost.

    Attributes:
        culprit: that arm; "" where none was.
        reason: what it raised.
        cause: of its row: memory that ran out, else a fault while it was timed.
    """

    def __init__(self, on_arm: Callable[[str], None], lost: Callable[[], str], timer: Timer) -> None:
        self._on_arm, self._lost, self._timer = on_arm, lost, timer
        self.culprit = self.reason = ""
        self.cause = Cause.NONE

    def range_of(self, name: str) -> AbstractContextManager[None]:
        """The context around a block."""
        return self.of(name, partial(self._timer.annotate, name))

    @contextmanager
    def of(self, name: str, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """A context of an arm, which is under way from then on: its memory, or a block."""
        arm = original_name(name)
        self._on_arm(arm)
        try:
            with context():
                yield
        except Exception as error:
            # A block ends with the device at rest: what it did wrong shows before the next arm has its turn.
            if not self.culprit and (isinstance(error, SpoiledError) or self._lost()):
                self.culprit, self.reason = arm, one_line(error)
                self.cause = cause_of(error, Cause.RUN)
            raise


def _rows_of(
    planned: PlannedCase,
    arm: PreparedArm,
    timing: Timing,
    recompiled: str,
    state: Mapping[str, object],
    device: str,
) -> list[Measurement]:
    """The rows of a timed arm: its time, and the energy of a training step."""
    rows = [time_row(planned, arm, timing, recompiled, state)]
    rows += split_row(planned, arm, timing, rows[0])
    if arm.workload.tokens and not timing.failure:
        energy = energy_row(planned, arm, timing, device)
        if energy.status == "ok" or not rows[0].is_control:
            rows.append(energy)
    return rows
