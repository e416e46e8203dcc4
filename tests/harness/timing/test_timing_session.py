"""Resident arms: oracles are a log of what was held when, and a meter whose watts are known."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeCuda, FakeTime

from harness.machine.gpu_monitor import NullMonitor
from harness.timing.rounds import TimingConfig, measure
from harness.timing.timers import CpuTimer, CudaTimer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = TimingConfig(
    min_rounds=4, max_rounds=4, min_samples=4, min_seconds=0.0, block_ms=10.0, warmup_min_seconds=0.0
)


class Meter(NullMonitor):
    """Counts a constant power over a fake clock; with a tick, it moves only once in so many seconds."""

    def __init__(self, clock: FakeTime, watts: float, tick: float = 0.0) -> None:
        self.clock, self.watts, self.tick = clock, watts, tick
        self.broken = False

    def energy_j(self) -> float | None:
        now = self.clock()
        seen = math.floor(now / self.tick) * self.tick if self.tick else now
        return None if self.broken else self.watts * seen


class Held:
    """Arms that may run only while they, and no others, are resident; entering takes a second."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock
        self.now: list[str] = []
        self.log: list[str] = []

    def arm(self, name: str, ms: float) -> Any:
        def run() -> None:
            assert self.now == [name]
            self.log.append(name)
            self.clock.sleep(1e-3 * ms)

        return run

    def resident(self, name: str) -> Any:
        @contextmanager
        def hold() -> Iterator[None]:
            self.now.append(name)
            self.log.append(f"+{name}")
            self.clock.sleep(1.0)
            try:
                yield
            finally:
                self.now.remove(name)
                self.log.append(f"-{name}")

        return hold

    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"a": self.arm("a", 2.0), "b": self.arm("b", 4.0)}, {n: self.resident(n) for n in "ab"}


def test_one_arm_is_resident_at_a_time_and_its_first_calls_are_no_samples(fake_time: FakeTime) -> None:
    held = Held(fake_time)
    arms, resident = held.both()
    timings = measure(arms, CpuTimer(fake_time), ROUNDS, clock=fake_time, resident=resident)
    assert held.now == []
    blocks = " ".join(held.log).split("-")
    for name, ms, n in (("a", 2.0, 5), ("b", 4.0, 2)):
        assert timings[name].samples_ms == pytest.approx([ms] * 4 * n), "what entering takes is in no sample"
        mine = [block.split(f"+{name}")[1].split() for block in blocks if f"+{name}" in block]
        assert [len(block) for block in mine][-4:] == [2 + n] * 4, "one allocates, one leads in"
    assert timings["a"].method == "perf_counter_adjoining"


def test_arms_without_residency_are_timed_as_ever(fake_time: FakeTime) -> None:
    held = Held(fake_time)
    held.now = ["a"]
    timings = measure({"a": held.arm("a", 2.0)}, CpuTimer(fake_time), ROUNDS, clock=fake_time)
    assert timings["a"].method == "perf_counter"
    assert len(held.log) == timings["a"].warmup_iterations + len(timings["a"].samples_ms)


def test_a_short_resident_step_is_never_grouped(fake_time: FakeTime) -> None:
    held = Held(fake_time)
    arms, resident = {"a": held.arm("a", 1e-3)}, {"a": held.resident("a")}
    (timing,) = measure(arms, CpuTimer(fake_time), ROUNDS, clock=fake_time, resident=resident).values()
    assert timing.calls_per_sample == 1


def test_adjoining_samples_flush_nothing_and_count_launch_gaps(fake_cuda: FakeCuda) -> None:
    """A kernel of 1 ms that takes the host 3 ms to launch: a sample is 3 ms. Held behind a queue it would be 1 ms."""
    step = fake_cuda.kernel(1e-3, host_s=3e-3)
    timer = CudaTimer(fake_cuda, allocate=fake_cuda.allocate, clock=fake_cuda.time)
    held = Held(fake_cuda.time)
    (timing,) = measure(
        {"a": step}, timer, ROUNDS, clock=fake_cuda.time, resident={"a": held.resident("a")}
    ).values()
    assert timing.samples_ms == pytest.approx([3.0] * len(timing.samples_ms), rel=1e-2)
    assert (timing.method, timing.l2, fake_cuda.flushes) == ("cuda_events_adjoining", "warm", 0)


def metered(fake_time: FakeTime, meter: Meter, ms: float, block_ms: float) -> Any:
    """One resident arm of so many ms a call, in blocks of so many."""
    config = replace(ROUNDS, block_ms=block_ms, max_seconds=1e3)
    held = Held(fake_time)
    arms, resident = {"a": held.arm("a", ms)}, {"a": held.resident("a")}
    (timing,) = measure(arms, CpuTimer(fake_time), config, 0, meter, fake_time, resident=resident).values()
    return timing


def test_energy_is_that_of_the_samples_alone(fake_time: FakeTime) -> None:
    """500 W over 50 and 100 ms; the second that entering takes, and the untimed call, are left out."""
    for ms, joules in ((50.0, 25.0), (100.0, 50.0)):
        timing = metered(fake_time, Meter(fake_time, 500.0), ms, 2500.0)
        assert timing.joules == pytest.approx([joules] * 4)


def test_a_meter_that_ticks_gives_a_figure_within_its_rounding_or_none(fake_time: FakeTime) -> None:
    """Ten times a second: a block of 20 ticks is off by one of them at most, one between two ticks reads 0 J."""
    meter = Meter(fake_time, 500.0, tick=0.1)
    assert metered(fake_time, meter, 50.0, 2500.0).joules == pytest.approx([25.0] * 4, rel=0.05)
    for block_ms in (20.0, 1800.0):
        short = metered(fake_time, meter, 10.0, block_ms)
        assert len(short.joules) == 4
        assert all(map(math.isnan, short.joules)), "no figure, and that a meter was there is known"


def test_energy_is_not_read_for_kernels_or_where_it_cannot_be(fake_time: FakeTime) -> None:
    held = Held(fake_time)
    arms, resident = held.both()
    broken = Meter(fake_time, 500.0)
    broken.broken = True
    timings = measure(arms, CpuTimer(fake_time), ROUNDS, 0, broken, fake_time, resident=resident)
    assert timings["a"].joules == ()
    held.now = ["a"]
    kernel = measure(
        {"a": held.arm("a", 2.0)}, CpuTimer(fake_time), ROUNDS, 0, Meter(fake_time, 1.0), fake_time
    )
    assert kernel["a"].joules == ()


def test_a_meter_that_fails_once_leaves_a_gap(fake_time: FakeTime) -> None:
    meter = Meter(fake_time, 500.0)
    held = Held(fake_time)

    def run() -> None:
        fake_time.sleep(1.5)
        meter.broken = (
            len(held.log) == 7
        )  # in the third round: three residencies, and their ends, came before

    rounds = TimingConfig(
        min_rounds=3, max_rounds=3, max_seconds=100.0, warmup_min_iterations=1, warmup_min_seconds=0.0
    )
    (timing,) = measure(
        {"a": run}, CpuTimer(fake_time), rounds, 0, meter, fake_time, resident={"a": held.resident("a")}
    ).values()
    assert timing.joules[:2] == pytest.approx([750.0, 750.0])
    assert math.isnan(timing.joules[2])


def test_an_arm_that_cannot_become_resident_fails_and_the_others_go_on(fake_time: FakeTime) -> None:
    held = Held(fake_time)
    arms, resident = held.both()

    @contextmanager
    def too_large() -> Iterator[None]:
        raise MemoryError("tried to allocate 80 GiB")
        yield

    resident["b"] = too_large
    timings = measure(arms, CpuTimer(fake_time), ROUNDS, clock=fake_time, resident=resident)
    assert timings["b"].failure == "out of memory: tried to allocate 80 GiB"
    assert timings["b"].samples_ms == ()
    assert not timings["a"].failure
    assert held.now == []
