"""Resident arms: oracles are a log of what was held when, and a meter whose watts are known."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeCuda, FakeTime

from harness.gpu_monitor import NullMonitor
from harness.timers import CpuTimer, CudaTimer
from harness.timing import TimingConfig, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = TimingConfig(
    min_rounds=4, max_rounds=4, min_samples=4, min_seconds=0.0, block_ms=10.0, warmup_min_seconds=0.0
)


class Meter(NullMonitor):
    """Counts a constant power over a fake clock."""

    def __init__(self, clock: FakeTime, watts: float) -> None:
        self.clock, self.watts = clock, watts
        self.broken = False

    def energy_j(self) -> float | None:
        return None if self.broken else self.watts * self.clock()


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


def test_energy_is_that_of_the_samples_alone(fake_time: FakeTime) -> None:
    """500 W over 2 and 4 ms; the second that entering takes, and the untimed call, are left out."""
    arms, resident = Held(fake_time).both()
    timings = measure(
        arms, CpuTimer(fake_time), ROUNDS, 0, Meter(fake_time, 500.0), fake_time, resident=resident
    )
    assert timings["a"].joules == pytest.approx([1.0] * 4)
    assert timings["b"].joules == pytest.approx([2.0] * 4)


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
        fake_time.sleep(2e-3)
        meter.broken = (
            len(held.log) == 7
        )  # in the third round: three residencies, and their ends, came before

    rounds = TimingConfig(min_rounds=3, max_rounds=3, warmup_min_iterations=1, warmup_min_seconds=0.0)
    (timing,) = measure(
        {"a": run}, CpuTimer(fake_time), rounds, 0, meter, fake_time, resident={"a": held.resident("a")}
    ).values()
    assert timing.joules[:2] == pytest.approx([1.0, 1.0])
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
