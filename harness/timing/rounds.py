"""Timing policy: warm-up, interleaving, stopping, and the two regimes in which a kernel is measured.

`measure` (isolated): all arms of a case are timed in rounds. In each round every arm gives one short block
of samples, in an order drawn anew, so that drift (clock, temperature, a neighbour) strikes all arms alike
and ratios can be taken round by round. It stops when the interval of every arm is narrow enough, or at a
cap; the reason is stored per arm.

`measure_sustained`: a few long back-to-back runs per arm, with operands rotating, for the state in which
training keeps a GPU: warm, power-limited and short of cache.

A *resident* arm is a whole training step that would fill the device alone. Its memory is there only while its
block runs: it is made before the block, two untimed calls lead in, and it is freed after. Its samples adjoin:
nothing is flushed and launch gaps count, as they do in training. With `pause_s` the device rests before each sample instead,
so that a step runs at the clock that the chip allows and not at the one that its power cap does.

Samples are never trimmed and never merged across rounds. Rounds, not samples, are the unit of every
interval: samples of one round share its clock and its neighbours, so they are not independent.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from typing import TYPE_CHECKING

from harness.timing.config import SHORT_MS, StopReason, Timing, TimingConfig, WarmupRule
from harness.timing.session import Resident, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.machine.gpu_monitor import Monitor
    from harness.timing.clock import Split
    from harness.timing.timers import L2State, Seconds, Timer

# Sustained samples of one run: enough to see a clock ramp inside of it.
_SAMPLES_PER_RUN = 20
_QUEUED = 64  # calls that may surely be queued at once


def measure(
    arms: Mapping[str, Callable[[], object]],
    timer: Timer,
    config: TimingConfig,
    seed: int = 0,
    monitor: Monitor | None = None,
    clock: Seconds = time.perf_counter,
    resident: Mapping[str, Resident] | None = None,
    on_warm: Callable[[], None] = lambda: None,
    on_round: Callable[[dict[str, Timing]], None] | None = None,
    splits: Mapping[str, Split] | None = None,
    rotations: Mapping[str, Sequence[Callable[[], object]]] | None = None,
) -> dict[str, Timing]:
    """Times all arms of a case in the isolated regime, interleaved.

    Args:
        arms: name -> closure without arguments. Compile and check it before.
        timer: the device's timer (`timer_for`).
        config: how long to warm up and to measure.
        seed: of the order of the arms in each round.
        monitor: reads clock, throttling and contention; none on CPU.
        clock: wall clock in seconds that rules warm-up and stopping.
        resident: of the arms that are whole training steps (all of a case or none), the context that holds their
            memory; see the module.
        on_warm: called once, between warm-up and the first round.
        on_round: given what was measured so far, after a round that others follow, `checkpoint_s` apart. What it takes
            is not charged to the case.
        splits: of arms whose closures mark a point: what a sample took up to it is kept too.
        rotations: of each arm closures over operand sets that together exceed twice the last cache, made when first
            asked for. Where an arm's calls take less than `SHORT_MS`, all arms take several calls a sample over them,
            and nothing is flushed: one method for all arms of a case.

    Returns:
        A Timing per arm. All arms that did not fail have the same rounds. An arm that raises leaves the
        later rounds and has `failure` set; the others go on.
    """
    session = Sampler(arms, timer, config, seed, monitor, clock, resident, splits)
    take = timer.back_to_back if resident else timer.block
    rule = _warm_up(session, take)
    mean = False
    if not resident and (turned := _rotated(session, rotations or {})) is not None:
        timer, take, mean = turned, turned.block, True
    for run in session.live().values():
        run.plan(timer, config)
    session.disturbed.clear()
    if config.pause_s:
        take = _bursts(take, config.pause_s, each=resident is not None)
    on_warm()
    begin, budget = clock(), config.max_seconds * len(arms)
    method, l2 = timer.method + ("_mean" if mean else ""), timer.l2
    if resident:
        method, l2 = (
            f"{method}_{'bursts' if config.pause_s else 'adjoining'}",
            "none" if l2 == "none" else "warm",
        )
    cap: StopReason = "sample_cap"
    kept, round_index = begin, -1
    while round_index + 1 < config.max_rounds and session.live():
        started = clock()
        round_index += 1
        for name, run in session.shuffled():
            if samples := session.sample(name, run, take, run.n, run.calls):
                session.record(round_index, run, samples)
                run.late += 0 if resident else timer.late
        if not session.keep(round_index) and session.stopped_rounds <= config.max_rounds:
            begin += clock() - started  # is made again, at no cost to the case
            round_index -= 1
            continue
        if round_index + 1 >= config.min_rounds and all(r.converged(config) for r in session.live().values()):
            break
        if clock() - begin >= budget:
            cap = "time_cap"
            break
        last = round_index + 1 == config.max_rounds
        if on_round is not None and not last and clock() - kept >= config.checkpoint_s:
            stopped = clock()
            on_round(session.finish("isolated", method, dict.fromkeys(arms, l2), rule, "under_way"))
            kept = clock()
            begin += kept - stopped
    return session.finish("isolated", method, dict.fromkeys(arms, l2), rule, cap)


def _bursts(take: Callable[..., list[float]], pause_s: float, each: bool) -> Callable[..., list[float]]:
    """Return `take` with a rest before each sample, or before a whole block; samples no longer adjoin.

    Args:
        take: a block of a timer, which returns when the device is idle.
        pause_s: seconds of rest.
        each: before each sample.
    """

    def taken(
        fn: Callable[[], object], n: int, calls: int, probe: Callable[[], None], split: Split | None = None
    ) -> list[float]:
        samples: list[float] = []
        split_ms: list[float] = []
        more = {} if split is None else {"split": split}
        for _ in range(n if each else 1):
            time.sleep(pause_s)
            samples += take(fn, 1 if each else n, calls, probe, **more)
            split_ms += split.samples_ms if split is not None else []
        if split is not None:
            split.samples_ms = split_ms
        return samples

    return taken


def _rotated(session: Sampler, rotations: Mapping[str, Sequence[Callable[[], object]]]) -> Timer | None:
    """Where a call is short, makes the arms rotate their operands, and returns the timer for it; None elsewhere."""
    live = session.live()
    if session.timer.l2 != "cold" or not any(run.call_ms < SHORT_MS for run in live.values()):
        return None
    lacking = [name for name in live if len(rotations.get(name, ())) < 2]
    turned = session.timer.rotating()
    if lacking or turned is None:
        session.short = (
            f"operands of {', '.join(lacking)} cannot fill twice the last cache" if lacking else "no flush"
        )
        return None
    session.timer = turned
    for name, run in live.items():
        closures = rotations[name]
        run.fn, run.call_ms, run.wall_ms = _rotate(closures), math.inf, math.inf
        session.load(name, run, turned.block, 1, 2)  # shows what a call takes, and makes the operands
        session.load(name, run, turned.block, 1, min(len(closures), _QUEUED))
    return turned


def _warm_up(session: Sampler, take: Callable[..., list[float]]) -> WarmupRule:
    """Loads the device until its clock is steady; returns the rule that ended it."""
    config, clock, timer = session.config, session.clock, session.timer
    readings: deque[float] = deque(maxlen=config.clock_window)
    begin = clock()
    while True:
        for name, run in session.live().items():
            # The first block is one call, as its length is not known (wall_ms is infinite).
            n = max(
                1, min(int(config.block_ms / max(run.wall_ms, timer.resolution_ms)), config.max_block_samples)
            )
            session.load(name, run, take, n, 1)
            if session.reading is not None:
                readings.append(session.reading)
        if not session.live():
            return "no_clock"
        elapsed = clock() - begin
        enough = elapsed >= config.warmup_min_seconds and all(
            run.warm_calls >= config.warmup_min_iterations for run in session.live().values()
        )
        if enough and not readings:
            return "no_clock"
        full = len(readings) == config.clock_window
        if enough and full and max(readings) - min(readings) <= config.clock_tolerance * max(readings):
            return "clock_stable"
        if elapsed >= config.warmup_max_seconds:
            return "time_cap"


def measure_sustained(
    arms: Mapping[str, Sequence[Callable[[], object]]],
    timer: Timer,
    config: TimingConfig,
    seed: int = 0,
    monitor: Monitor | None = None,
    clock: Seconds = time.perf_counter,
) -> dict[str, Timing]:
    """Times all arms of a case under sustained load, each rotating through its closures.

    Each arm runs `sustained_rounds` times, interleaved in random order. One run is an untimed lead-in, in
    which clock and power settle for this arm, and then `sustained_seconds / sustained_rounds` of load in
    about 20 adjoining samples. Several runs rather than one long one: a drift of temperature meets all
    arms, and the rounds give paired ratios and an interval.

    A sample is the mean over `calls_per_sample` calls between two clock marks (method "..._mean"): an
    event between any two calls would itself open a gap. Launch gaps count, caches are not flushed.

    Args:
        arms: name -> closures over different operands of the same shapes; a single one means its operands
            may stay in cache (`l2="warm"` instead of "rotating").
        timer: as in `measure`.
        config: the `sustained_...` fields count here.
        seed: as in `measure`.
        monitor: as in `measure`.
        clock: as in `measure`.

    Returns:
        As `measure`; rounds are `sustained_rounds` unless `max_seconds` per arm is spent before.

    Raises:
        ValueError: an arm without closures.
    """
    for name, closures in arms.items():
        if not closures:
            raise ValueError(f"arm {name!r} has no closure to run")
    rotating = {name: _rotate(closures) for name, closures in arms.items()}
    session = Sampler(rotating, timer, config, seed, monitor, clock)
    run_ms = 1e3 * config.sustained_seconds / config.sustained_rounds
    lead_ms = 1e3 * config.sustained_lead_seconds
    begin, budget = clock(), config.max_seconds * len(arms)
    cap: StopReason = "sample_cap"
    for name, run in session.live().items():
        session.load(name, run, timer.back_to_back, 1, 1)  # shows what a call takes
    for round_index in range(config.sustained_rounds):
        for name, run in session.shuffled():
            turn = len(arms[name])
            session.load(name, run, timer.back_to_back, 1, run.calls_in(lead_ms, turn))
            if round_index == 0:
                run.calls = run.calls_in(run_ms / _SAMPLES_PER_RUN, turn)
                run.n = max(1, round(run.calls_in(run_ms, turn) / run.calls))
            if not run.failure and (
                samples := session.sample(name, run, timer.back_to_back, run.n, run.calls)
            ):
                session.record(round_index, run, samples)
        if not session.live():
            break
        if clock() - begin >= budget and round_index + 1 < config.sustained_rounds:
            cap = "time_cap"
            break
    l2: dict[str, L2State] = {name: "rotating" if len(fns) > 1 else "warm" for name, fns in arms.items()}
    return session.finish("sustained", timer.method + "_mean", l2, "lead_in", cap)


def _rotate(closures: Sequence[Callable[[], object]]) -> Callable[[], object]:
    if isinstance(closures, tuple) and len(set(map(id, closures))) == 1:
        return closures[0]  # a single one, or a remote arm's, whose process takes the turns
    turn = itertools.cycle(closures)
    return lambda: next(turn)()
