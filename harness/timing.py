"""Timing policy: warm-up, interleaving, stopping, and the two regimes in which a kernel is measured.

`measure` (isolated): all arms of a case are timed in rounds. In each round every arm gives one short block
of samples, in an order drawn anew, so that drift (clock, temperature, a neighbour) strikes all arms alike
and ratios can be taken round by round. It stops when the interval of every arm is narrow enough, or at a
cap; the reason is stored per arm.

`measure_sustained`: a few long back-to-back runs per arm, with operands rotating, for the state in which
training keeps a GPU: warm, power-limited and short of cache.

Samples are never trimmed and never merged across rounds. Rounds, not samples, are the unit of every
interval: samples of one round share its clock and its neighbours, so they are not independent.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Literal

from harness.gpu_monitor import THROTTLING, Monitor, NullMonitor
from harness.stats import t_interval
from harness.timers import Clock, CpuTimer, CudaTimer, L2State, Timer, timer_for

__all__ = [
    "CpuTimer",
    "CudaTimer",
    "Timer",
    "Timing",
    "TimingConfig",
    "measure",
    "measure_sustained",
    "timer_for",
]

Regime = Literal["isolated", "sustained"]
WarmupRule = Literal["clock_stable", "no_clock", "time_cap", "lead_in"]
StopReason = Literal["converged", "time_cap", "sample_cap", "throttled"]
Annotate = Callable[[str], AbstractContextManager[object]]

# A sample shorter than 50 steps of its clock carries over 2 % of rounding.
_STEPS_PER_SAMPLE = 50
# A Python call takes at least some 50 ns. Without a floor, one that reads as 0 ms would be repeated forever.
_SHORTEST_CALL_MS = 5e-5
# Sustained samples of one run: enough to see a clock ramp inside of it.
_SAMPLES_PER_RUN = 20


@dataclass(frozen=True)
class TimingConfig:
    """How long to measure. Seconds are wall-clock; the defaults suit one GPU kernel.

    Attributes:
        min_rounds: rounds before the stop rule is asked; below 8 a t interval says little.
        max_rounds: cap on rounds; up to 40 the sign-flip test counts every pattern.
        min_samples: samples an arm needs before it may stop.
        min_seconds: time an arm must have been measured before it may stop.
        max_seconds: time cap per arm; a case of A arms ends in the round in which A times this is spent.
        rel_half_width: an arm has converged when the 95 % t interval of its round medians (on logs) is
            narrower than this share to either side.
        block_ms: target length of one arm's block in a round; short against clock drift, long against the
            cost of switching arms.
        max_block_samples: cap on samples in a block. With `max_rounds` it bounds what a row stores.
        warmup_min_iterations: calls of each arm before the first sample.
        warmup_min_seconds: steady load before the first sample, all arms of the case together, since the
            clock belongs to the device and not to an arm.
        warmup_max_seconds: cap on the warm-up of a case.
        clock_window: SM-clock readings that must agree before the clock counts as stable.
        clock_tolerance: their relative range, at most.
        sustained_seconds: timed load per arm in the sustained regime, spread over its rounds.
        sustained_rounds: rounds of the sustained regime; at least 4, to have intervals at all.
        sustained_lead_seconds: untimed load at the head of each sustained run. Power control settles in
            some tens of milliseconds after the arm changes.
        sustained_max_cases: cases per sweep that are measured so (the executor picks the largest).
    """

    min_rounds: int = 8
    max_rounds: int = 40
    min_samples: int = 30
    min_seconds: float = 0.25
    max_seconds: float = 5.0
    rel_half_width: float = 0.005
    block_ms: float = 20.0
    max_block_samples: int = 100
    warmup_min_iterations: int = 3
    warmup_min_seconds: float = 0.5
    warmup_max_seconds: float = 5.0
    clock_window: int = 10
    clock_tolerance: float = 0.02
    sustained_seconds: float = 2.0
    sustained_rounds: int = 4
    sustained_lead_seconds: float = 0.2
    sustained_max_cases: int = 6

    def __post_init__(self) -> None:
        at_least = {
            **dict.fromkeys(("min_rounds", "max_rounds", "min_samples", "max_block_samples"), 1),
            **dict.fromkeys(("warmup_min_iterations", "sustained_rounds"), 1),
            "clock_window": 2,
        }
        positive = (
            "max_seconds",
            "rel_half_width",
            "warmup_max_seconds",
            "clock_tolerance",
            "sustained_seconds",
        )
        for f in fields(self):
            value = getattr(self, f.name)
            if not math.isfinite(value) or value < at_least.get(f.name, 0):
                raise ValueError(
                    f"timing.{f.name}={value}: must be finite and at least {at_least.get(f.name, 0)}"
                )
            if f.name in positive and value == 0:
                raise ValueError(f"timing.{f.name}=0: must be above 0")
        for low, high in (
            ("min_rounds", "max_rounds"),
            ("min_seconds", "max_seconds"),
            ("warmup_min_seconds", "warmup_max_seconds"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"timing.{low}={getattr(self, low)} is above timing.{high}={getattr(self, high)}"
                )


@dataclass(frozen=True)
class Timing:
    """What was measured of one arm, and how. With a `failure` there are no samples.

    Attributes:
        samples_ms: ms per call, in the order taken.
        rounds: round of each sample.
        sample_clock_mhz: SM clock while each sample's block ran; NaN where one reading failed, empty where
            none worked.
        calls_per_sample: calls that one sample spans (it holds their mean).
        late_samples: samples whose work was not wholly queued when the device reached it (CUDA only).
        rel_half_width: what the stop rule saw at the end; None below two rounds.
        throttled_rounds: rounds in which a throttle reason was read; their samples are kept.
        contended: another process computed on the device before or after; None where it can't be known.
    """

    samples_ms: tuple[float, ...]
    rounds: tuple[int, ...]
    sample_clock_mhz: tuple[float, ...]
    regime: Regime
    method: str
    l2: L2State
    warmup_iterations: int
    warmup_seconds: float
    warmup_rule: WarmupRule
    stop_reason: StopReason
    throttled: bool
    contended: bool | None
    calls_per_sample: int = 1
    late_samples: int = 0
    seconds: float = 0.0
    rel_half_width: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    throttled_rounds: tuple[int, ...] = ()
    failure: str = ""

    def as_json_dict(self) -> dict[str, object]:
        """The store's `timing` column: all that has no column of its own."""
        own_column = {"samples_ms", "rounds", "sample_clock_mhz", "regime", "failure"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own_column}


@dataclass
class _Run:
    """Running state of one arm."""

    fn: Callable[[], object]
    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    clocks: list[float | None] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # one per round
    throttles: dict[int, frozenset[str]] = field(default_factory=dict)
    seconds: float = 0.0
    late: int = 0
    warm_calls: int = 0
    warm_seconds: float = 0.0
    call_ms: float = math.inf  # best sample so far
    wall_ms: float = math.inf  # best time of a block over its samples: flush, hold and bookkeeping included
    n: int = 1
    calls: int = 1
    failure: str = ""

    def plan(self, timer: Timer, config: TimingConfig) -> None:
        """Fixes the samples of a block and the calls of a sample, from what the warm-up saw."""
        if timer.l2 != "cold":  # a second call would find its operands in cache
            wanted_ms = max(
                _STEPS_PER_SAMPLE * timer.resolution_ms, config.block_ms / config.max_block_samples
            )
            self.calls = math.ceil(wanted_ms / max(self.call_ms, _SHORTEST_CALL_MS))
        sample_ms = max(self.wall_ms * self.calls, timer.resolution_ms)
        least = math.ceil(config.min_samples / config.min_rounds)
        fitting = min(int(config.block_ms / sample_ms), config.max_block_samples)
        affordable = int(1e3 * config.max_seconds / config.min_rounds / sample_ms)
        self.n = max(1, min(max(least, fitting), affordable))

    def calls_in(self, load_ms: float, turn: int) -> int:
        """Calls that fill a time; from one turn of the closures on, whole turns: each runs equally often."""
        calls = load_ms / max(self.call_ms, _SHORTEST_CALL_MS)
        return max(1, round(calls)) if calls < turn else turn * round(calls / turn)

    def rel_half_width(self) -> float | None:
        """Half-width of the 95 % t interval of the log round medians, as a share; None below two rounds."""
        if len(self.medians) < 2 or min(self.medians) <= 0:
            return None
        low, high = t_interval([math.log(m) for m in self.medians])
        return math.expm1((high - low) / 2)

    def converged(self, config: TimingConfig) -> bool:
        """Whether this arm may stop."""
        if len(self.samples) < config.min_samples or self.seconds < config.min_seconds:
            return False
        width = self.rel_half_width()
        return width is not None and width < config.rel_half_width


class _Session:
    """One call of `measure` or `measure_sustained`: the arms and what watches them."""

    def __init__(
        self,
        arms: Mapping[str, Callable[[], object]],
        timer: Timer,
        config: TimingConfig,
        seed: int,
        monitor: Monitor | None,
        clock: Clock,
        annotate: Annotate | None,
    ) -> None:
        self.runs = {name: _Run(fn) for name, fn in arms.items()}
        self.timer, self.config, self.clock = timer, config, clock
        self.monitor: Monitor = monitor if monitor is not None else NullMonitor()
        self.annotate = annotate or timer.annotate
        self.random = random.Random(seed)
        self.reading: float | None = None
        self.reasons: frozenset[str] = frozenset()
        self.contended = self.monitor.contended()

    def live(self) -> dict[str, _Run]:
        """Arms that have not failed."""
        return {name: run for name, run in self.runs.items() if not run.failure}

    def shuffled(self) -> list[tuple[str, _Run]]:
        """Live arms in an order drawn anew."""
        arms = list(self.live().items())
        self.random.shuffle(arms)
        return arms

    def probe(self) -> None:
        """Reads clock and throttle reasons; timers call it while the device works."""
        self.reading = self.monitor.sm_clock_mhz()
        self.reasons = (self.monitor.throttle_reasons() or frozenset()) & THROTTLING

    def sample(
        self, name: str, run: _Run, take: Callable[..., list[float]], n: int, calls: int
    ) -> list[float]:
        """One block of an arm; an arm that raises is marked as failed and yields no samples."""
        begin = self.clock()
        try:
            with self.annotate(name):
                samples = take(run.fn, n, calls, self.probe)
        except Exception as error:  # noqa: BLE001 -- the closure is anyone's; its failure becomes a row
            run.failure = f"{type(error).__name__}: {error}"
            return []
        wall = self.clock() - begin
        run.seconds += wall
        run.call_ms = min(run.call_ms, *samples)
        run.wall_ms = min(run.wall_ms, 1e3 * wall / (n * calls))
        return samples

    def load(self, name: str, run: _Run, take: Callable[..., list[float]], n: int, calls: int) -> None:
        """One block whose samples are not kept: warm-up."""
        before = run.seconds
        if self.sample(name, run, take, n, calls):
            run.warm_calls += n * calls
        run.warm_seconds += run.seconds - before
        run.seconds = before

    def record(self, round_index: int, run: _Run, samples: list[float]) -> None:
        """Keeps one round of an arm."""
        run.samples += samples
        run.rounds += [round_index] * len(samples)
        run.clocks += [self.reading] * len(samples)
        run.medians.append(statistics.median(samples))
        if self.reasons:
            run.throttles[round_index] = self.reasons

    def finish(
        self, regime: Regime, method: str, l2: Mapping[str, L2State], rule: WarmupRule, cap: StopReason
    ) -> dict[str, Timing]:
        """Turns the state of every arm into its Timing."""
        after = self.monitor.contended()
        contended = None if self.contended is None and after is None else bool(self.contended or after)
        result = {}
        for name, run in self.runs.items():
            failed = bool(run.failure)
            stop: StopReason = cap
            if run.converged(self.config):
                stop = "converged"
            elif run.throttles:
                stop = "throttled"
            known = any(c is not None for c in run.clocks) and not failed
            result[name] = Timing(
                samples_ms=() if failed else tuple(run.samples),
                rounds=() if failed else tuple(run.rounds),
                sample_clock_mhz=tuple(math.nan if c is None else c for c in run.clocks) if known else (),
                regime=regime,
                method=method,
                l2=l2[name],
                warmup_iterations=run.warm_calls,
                warmup_seconds=run.warm_seconds,
                warmup_rule=rule,
                stop_reason=stop,
                throttled=bool(run.throttles),
                contended=contended,
                calls_per_sample=run.calls,
                late_samples=run.late,
                seconds=run.seconds,
                rel_half_width=run.rel_half_width(),
                throttle_reasons=tuple(sorted(frozenset().union(*run.throttles.values()))),
                throttled_rounds=tuple(run.throttles),
                failure=run.failure,
            )
        return result


def measure(
    arms: Mapping[str, Callable[[], object]],
    timer: Timer,
    config: TimingConfig,
    seed: int = 0,
    monitor: Monitor | None = None,
    clock: Clock = time.perf_counter,
    annotate: Annotate | None = None,
) -> dict[str, Timing]:
    """Times all arms of a case in the isolated regime, interleaved.

    Args:
        arms: name -> closure without arguments. Compile and check it before.
        timer: the device's timer (`timer_for`).
        config: how long to warm up and to measure.
        seed: of the order of the arms in each round.
        monitor: reads clock, throttling and contention; none on CPU.
        clock: wall clock in seconds that rules warm-up and stopping.
        annotate: name -> context around each block; the timer's profiler range by default.

    Returns:
        A Timing per arm. All arms that did not fail have the same rounds. An arm that raises leaves the
        later rounds and has `failure` set; the others go on.
    """
    session = _Session(arms, timer, config, seed, monitor, clock, annotate)
    rule = _warm_up(session)
    for run in session.live().values():
        run.plan(timer, config)
    begin, budget = clock(), config.max_seconds * len(arms)
    cap: StopReason = "sample_cap"
    for round_index in range(config.max_rounds):
        if not session.live():
            break
        for name, run in session.shuffled():
            if samples := session.sample(name, run, timer.block, run.n, run.calls):
                session.record(round_index, run, samples)
                run.late += timer.late
        if round_index + 1 >= config.min_rounds and all(r.converged(config) for r in session.live().values()):
            break
        if clock() - begin >= budget:
            cap = "time_cap"
            break
    return session.finish("isolated", timer.method, dict.fromkeys(arms, timer.l2), rule, cap)


def _warm_up(session: _Session) -> WarmupRule:
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
            session.load(name, run, timer.block, n, 1)
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
    clock: Clock = time.perf_counter,
    annotate: Annotate | None = None,
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
        annotate: as in `measure`.

    Returns:
        As `measure`; rounds are `sustained_rounds` unless `max_seconds` per arm is spent before.

    Raises:
        ValueError: an arm without closures.
    """
    for name, closures in arms.items():
        if not closures:
            raise ValueError(f"arm {name!r} has no closure to run")
    rotating = {name: _rotate(closures) for name, closures in arms.items()}
    session = _Session(rotating, timer, config, seed, monitor, clock, annotate)
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
    turn = itertools.cycle(closures)
    return lambda: next(turn)()
