"""Bench: measures one case, all its arms, and turns what happens into rows.

Within a case the order is fixed: build every arm, compile (timed apart), check the numerics, and only then time the arms
that are right, interleaved. An arm that cannot be built, is wrong, dies, hangs, or recompiles while it is timed ends as a
`failed` row with its reason; the other arms go on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.engine.arms import ArmPool, OnMessage, RemoteArm, RemoteTimer, prepared
from harness.engine.rows import PreparedArm, energy_row, partial_row, row, skipped_rows, split_row, time_row
from harness.engine.stages import Stage, StageKind
from harness.machine import environment
from harness.store.case import control_name, original_name
from harness.store.errors import Cause
from harness.timing.rounds import measure, measure_sustained
from harness.timing.workload import world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from harness.engine.plan import PlannedCase
    from harness.engine.turns import Turns
    from harness.machine.gpu_monitor import Monitor
    from harness.store.measurement import Measurement
    from harness.timing.config import Timing, TimingConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """How cases are measured, wherever that is.

    Attributes:
        device: "cpu" or "cuda".
        timing: warm-up, rounds and stop rule.
        seed: of the order of the arms within the rounds.
        control: time each baseline twice (A/A).
        warm_compile: compile a second time, from the caches that the first one filled.
        in_turns: beside the same sweep of another commit: what is compiled finds empty caches, and the operators that a call of
            any other arm hands to PyTorch are counted.
        folder: of the run, for files that belong to rows (traces).
    """

    device: str
    timing: TimingConfig
    seed: int = 0
    control: bool = True
    folder: Path | None = None
    warm_compile: bool = True
    in_turns: bool = False


def measure_case(
    planned: PlannedCase,
    arm_pool: ArmPool,
    setting: Setting,
    monitor: Monitor,
    *,
    sustained: bool = False,
    notify: OnMessage = lambda sign: None,
    on_rows: Callable[[list[Measurement]], None] | None = None,
    turns: Turns | None = None,
) -> list[Measurement]:
    """All rows of one case.

    Args:
        planned: the case.
        arm_pool: the processes of its arms.
        setting: how.
        monitor: reads clocks, power and throttling of the GPU.
        sustained: under sustained load as well.
        notify: given the start of each stage, for people who wait.
        on_rows: given all rows so far between two rounds, those of times as `partial`.
        turns: it is measured in blocks that are given to it.

    Raises:
        LateError: the case has taken too long as a whole.
    """
    timing, seed = setting.timing, setting.seed
    rows = skipped_rows(planned)
    arm_pool.begin(planned.runnable, world_of(planned.suite, planned.case))
    arms: dict[str, PreparedArm] = {}
    remotes: dict[str, RemoteArm] = {}
    for name in planned.runnable:
        notify(Stage(StageKind.BUILD, name))
        if (found := prepared(arm_pool, planned, name, setting, rows, notify)) is not None:
            arms[name], remotes[name] = found
    monitor.share_with(arm_pool.pids())
    if setting.control:
        baselines = {arm.baseline or arm.name for arm in arms.values()}
        for name in [name for name in arms if name in baselines]:
            control = control_name(name)
            arms[control] = replace(arms[name], name=control, baseline=name)
    # Events would see a launch cost only where the device waits for the host.
    timer = RemoteTimer(list(remotes.values()), on_host=any(arm.workload.on_host for arm in arms.values()))
    resident = {name: arm.workload.resident for name, arm in arms.items() if arm.workload.resident}
    notify(Stage(StageKind.WARM_UP))
    before = environment.snapshot(monitor)

    def time_rows(timings: Iterable[tuple[str, Timing]]) -> list[Measurement]:
        faults = {name: remote.finish() for name, remote in remotes.items()}
        state = {"before": before, "after": environment.snapshot(monitor)}
        return [
            one
            for name, timed in timings
            for one in _rows_of(planned, arms[name], timed, faults[original_name(name)], state, setting)
        ]

    def keep(timings: Mapping[str, Timing]) -> None:
        if on_rows is not None:
            on_rows([*rows, *(partial_row(one, timing.min_rounds) for one in time_rows(timings.items()))])

    def timed(config: TimingConfig, seed: int) -> dict[str, Timing]:
        return measure(
            {name: arm.workload.run for name, arm in arms.items()},
            timer,
            config,
            seed,
            monitor,
            resident=resident,
            on_warm=lambda: notify(Stage(StageKind.TIME)),
            on_round=None if on_rows is None else keep,
            splits={name: arm.workload.split for name, arm in arms.items() if arm.workload.split},
            rotations={name: arm.workload.covering for name, arm in arms.items() if arm.workload.covering},
        )

    timings = list((timed(timing, seed) if turns is None else turns.blocks(timed, timing)).items())
    if sustained and not resident:  # a resident arm is under its own load already
        keep(dict(timings))
        notify(Stage(StageKind.SUSTAIN))
        # Listed first: making the copies takes memory and time that no timed call may spend.
        rotating = {n: tuple(a.workload.variants) or (a.workload.run,) for n, a in arms.items()}
        timings += measure_sustained(rotating, timer, timing, seed, monitor).items()
    rows += time_rows(timings)
    if lost := arm_pool.lost():
        why = f"the device was lost in this case: {lost}; resume=RUN_ID runs it again"
        own = {
            original_name(r.arm) for r in rows if r.status == "failed" and r.cause is not Cause.DEVICE_LOST
        }
        others = [name for name in planned.runnable if name not in own]
        rows = [r for r in rows if original_name(r.arm) not in others]
        rows += [row(planned, name, "failed", reason=why, cause=Cause.DEVICE_LOST) for name in others]
    else:
        rows = arm_pool.end(rows)
    return rows


def _rows_of(
    planned: PlannedCase,
    arm: PreparedArm,
    timing: Timing,
    fault: tuple[str, Cause],
    state: Mapping[str, object],
    setting: Setting,
) -> list[Measurement]:
    """The rows of a timed arm: its time, and the energy of a training step."""
    rows = [time_row(planned, arm, timing, fault, state)]
    rows += split_row(planned, arm, timing, rows[0])
    if arm.workload.tokens and rows[0].status == "ok":
        energy = energy_row(planned, arm, timing, setting.device)
        if energy.status == "ok" or not rows[0].is_control:
            rows.append(energy)
    return rows
