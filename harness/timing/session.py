"""The arms of one timing session: what was sampled of each, and how one block of an arm is taken.

`harness.timing.rounds` decides how many blocks and in which order; this file takes them and keeps what they gave.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.machine.gpu_monitor import THROTTLING, Monitor
from harness.store.errors import Cause, LateError, cause_of, one_line
from harness.store.stats import t_interval
from harness.timing.config import Regime, StopReason, Timing, TimingConfig, WarmupRule

if TYPE_CHECKING:
    from harness.timing.clock import Split
    from harness.timing.timers import L2State, Seconds, Timer

Resident = Callable[[], AbstractContextManager[object]]

# A sample shorter than 50 steps of its clock carries over 2 % of rounding.
_STEPS_PER_SAMPLE = 50
# NVML's energy meter moves some ten times a second. A block that spans fewer steps carries over 5 % of rounding, and
# one that falls between two of them has used nothing at all.
METERED_S = 20 * 0.1
# A Python call takes at least some 50 ns. Without a floor, one that reads as 0 ms would be repeated forever.
_SHORTEST_CALL_MS = 5e-5


@dataclass
class ArmRun:
    """Running state of one arm."""

    fn: Callable[[], object]
    resident: Resident | None = None
    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    clocks: list[float | None] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # one per round
    throttles: dict[int, frozenset[str]] = field(default_factory=dict)
    # Of one call, by round: None where the meter was not read, NaN where the block was too short for it.
    joules: list[float | None] = field(default_factory=list)
    split: Split | None = None  # a point inside of `fn`
    split_ms: list[float] = field(default_factory=list)  # of each sample up to there
    seconds: float = 0.0
    late: int = 0
    warm_calls: int = 0
    warm_seconds: float = 0.0
    call_ms: float = math.inf  # best sample so far
    wall_ms: float = math.inf  # best time of a block over its samples: flush, hold and bookkeeping included
    n: int = 1
    calls: int = 1
    failure: str = ""
    cause: Cause = Cause.NONE

    def plan(self, timer: Timer, config: TimingConfig) -> None:
        """Fixes the samples of a block and the calls of a sample, from what the warm-up saw."""
        # A cold arm's second call would find its operands in cache; a resident one's call is a sample.
        if timer.l2 != "cold" and self.resident is None:
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


class Sampler:
    """One call of `measure` or `measure_sustained`: the arms and what watches them."""

    def __init__(
        self,
        arms: Mapping[str, Callable[[], object]],
        timer: Timer,
        config: TimingConfig,
        seed: int,
        monitor: Monitor | None,
        clock: Seconds,
        resident: Mapping[str, Resident] | None = None,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        self.runs = {
            name: ArmRun(fn, (resident or {}).get(name), split=(splits or {}).get(name))
            for name, fn in arms.items()
        }
        self.short = ""  # see Timing
        self.timer, self.config, self.clock = timer, config, clock
        self.monitor: Monitor = monitor if monitor is not None else Monitor()
        self.random = random.Random(seed)
        self.reading: float | None = None
        self.joules: float | None = None  # of one call of the last block, as in Run
        self.reasons: frozenset[str] = frozenset()
        self.contended = self.monitor.contended()
        self.contended_rounds: list[int] = []
        self.stopped_rounds = 0
        self.disturbed: set[str] = set()  # see `Timer`, of the blocks of a round

    def live(self) -> dict[str, ArmRun]:
        """Arms that have not failed."""
        return {name: run for name, run in self.runs.items() if not run.failure}

    def shuffled(self) -> list[tuple[str, ArmRun]]:
        """Live arms in an order drawn anew."""
        arms = list(self.live().items())
        self.random.shuffle(arms)
        return arms

    def probe(self) -> None:
        """Reads clock and throttle reasons; timers call it while the device works."""
        self.reading = self.monitor.sm_clock_mhz()
        self.reasons = (self.monitor.throttle_reasons() or frozenset()) & THROTTLING

    def sample(
        self, name: str, run: ArmRun, take: Callable[..., list[float]], n: int, calls: int
    ) -> list[float]:
        """One block of an arm; an arm that raises is marked as failed and yields no samples."""
        # One more call leads into a resident block: its first sample must not begin on an idle device.
        lead = 0 if run.resident is None else 1
        try:
            with self._resident(run):
                # It says nothing of a block of kernels, which is far shorter than METERED_S.
                # Nor of bursts, whose pauses cost energy that no call used
                metered = bool(lead) and not self.config.pause_s
                joules = self.monitor.energy_j() if metered else None
                begin = self.clock()
                with self.timer.annotate(name):
                    for _ in range(lead):
                        run.fn()
                    if run.split is not None and calls == 1:
                        samples = take(run.fn, n, calls, self.probe, split=run.split)
                    else:
                        samples = take(run.fn, n, calls, self.probe)
                wall = self.clock() - begin
                after = self.monitor.energy_j() if metered else None
        except LateError:
            raise
        except Exception as error:  # noqa: BLE001 -- the closure is anyone's; its failure becomes a row
            run.failure, run.cause = one_line(error), cause_of(error, Cause.RUN)
            return []
        self.disturbed.add(self.timer.disturbed)
        made = n * calls + lead
        self.joules = None
        if joules is not None and after is not None:
            self.joules = (after - joules) / made if wall >= METERED_S else math.nan
        run.seconds += wall
        run.call_ms = min(run.call_ms, *samples)
        run.wall_ms = min(run.wall_ms, 1e3 * wall / made)
        return samples

    @contextmanager
    def _resident(self, run: ArmRun) -> Iterator[None]:
        """The arm's memory while its block runs, after one call that allocates the rest; the device is idle."""
        if run.resident is None:
            yield
            return
        with run.resident():
            run.fn()
            self.timer.synchronize()
            yield

    def load(self, name: str, run: ArmRun, take: Callable[..., list[float]], n: int, calls: int) -> None:
        """One block whose samples are not kept: warm-up."""
        before = run.seconds
        if self.sample(name, run, take, n, calls):
            run.warm_calls += n * calls
        run.warm_seconds += run.seconds - before
        run.seconds = before

    def record(self, round_index: int, run: ArmRun, samples: list[float]) -> None:
        """Keeps one round of an arm."""
        run.samples += samples
        if run.split is not None:
            run.split_ms += run.split.samples_ms
        run.rounds += [round_index] * len(samples)
        run.clocks += [self.reading] * len(samples)
        run.joules.append(self.joules)
        run.medians.append(statistics.median(samples))
        if self.reasons:
            run.throttles[round_index] = self.reasons

    def keep(self, round_index: int) -> bool:
        """Mark a whole round as it was disturbed; False where a process was stopped in it: it is forgotten, of all arms."""
        disturbed, self.disturbed = self.disturbed, set()
        if "stopped" in disturbed:
            self.stopped_rounds += 1
            for run in self.runs.values():
                if count := run.rounds.count(round_index):
                    for kept in (run.samples, run.rounds, run.clocks, run.split_ms if run.split else []):
                        del kept[-count:]
                    del run.joules[-1], run.medians[-1]
                    run.throttles.pop(round_index, None)
            return False
        beside = self.monitor.contended()
        if beside is not None:
            self.contended = bool(self.contended or beside)
        if beside or "contended" in disturbed:
            self.contended_rounds.append(round_index)
        return True

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
            if cap == "under_way":
                pass  # more rounds follow
            elif run.converged(self.config):
                stop = "converged"
            elif run.throttles:
                stop = "throttled"
            known = any(c is not None for c in run.clocks) and not failed
            metered = any(j is not None for j in run.joules) and not failed
            result[name] = Timing(
                samples_ms=() if failed else tuple(run.samples),
                rounds=() if failed else tuple(run.rounds),
                sample_clock_mhz=tuple(math.nan if c is None else c for c in run.clocks) if known else (),
                joules=tuple(math.nan if j is None else j for j in run.joules) if metered else (),
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
                cause=run.cause,
                resolution_ms=self.timer.resolution_ms / run.calls,
                hold=self.timer.hold
                if method.startswith("cuda_events") and regime == "isolated" and not run.resident
                else "",
                short=self.short,
                contended_rounds=tuple(self.contended_rounds),
                stopped_rounds=self.stopped_rounds,
                pause_s=self.config.pause_s if regime == "isolated" else 0.0,
                split_ms=tuple(run.split_ms) if len(run.split_ms) == len(run.samples) and not failed else (),
            )
        return result
