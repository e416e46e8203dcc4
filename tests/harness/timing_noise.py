"""Calls that take a noisy time, and a monitor that is told what to say."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from fakes import FakeTime

from harness.machine.gpu_monitor import NullMonitor
from harness.timing.rounds import Timing, TimingConfig, measure
from harness.timing.timers import CpuTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


QUICK = TimingConfig(
    min_rounds=1,
    max_rounds=1,
    min_samples=1,
    min_seconds=0.0,
    block_ms=0.0,
    warmup_min_iterations=1,
    warmup_min_seconds=0.0,
)


class Noise:
    """Closures that take a mean time with lognormal noise, on a fake clock."""

    def __init__(self, clock: FakeTime, seed: int = 0) -> None:
        self.clock, self.random = clock, random.Random(seed)
        self.calls: list[str] = []

    def arm(self, name: str, ms: float, spread: float = 0.001) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(name)
            self.clock.sleep(1e-3 * ms * math.exp(self.random.gauss(0, spread)))

        return run


class WatchedMonitor(NullMonitor):
    """A monitor that says what the test tells it to, one answer per reading."""

    def __init__(self, clocks: Iterator[float | None], reasons: Iterator[set[str]] | None = None) -> None:
        self.clocks, self.reasons = clocks, reasons
        self.answers: list[bool | None] = [False, False]

    def sm_clock_mhz(self) -> float | None:
        return next(self.clocks)

    def throttle_reasons(self) -> frozenset[str] | None:
        return frozenset(next(self.reasons)) if self.reasons else None

    def contended(self) -> bool | None:
        return self.answers.pop(0)


def forever(*values: float | None) -> Iterator[float | None]:
    """The values, then the last one without end."""
    yield from values
    while True:
        yield values[-1]


def run_noisy(config: TimingConfig, spread: float = 0.001, seed: int = 0) -> tuple[dict[str, Timing], Noise]:
    clock = FakeTime()
    noise = Noise(clock)
    arms = {"a": noise.arm("a", 2.0, spread), "b": noise.arm("b", 3.0, spread)}
    return measure(arms, CpuTimer(clock), config, seed, clock=clock), noise
