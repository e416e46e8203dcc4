"""Rounds, warm-up and the rule that ends them. Oracle: scipy's t interval, clocks that move only when told to."""

from __future__ import annotations

import itertools
import statistics
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.stats
from fakes import FakeCuda, FakeTime

from harness.timing.rounds import TimingConfig, measure, measure_sustained
from harness.timing.timers import CpuTimer, CudaTimer

if TYPE_CHECKING:
    from collections.abc import Iterator
import math
import random
from typing import TYPE_CHECKING, Any

from fakes import FakeHold, FakeNvml

from harness.machine.gpu_monitor import GpuMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
from harness.machine.gpu_monitor import Monitor
from harness.timing.rounds import Timing


def test_half_width_is_that_of_the_t_interval_of_log_round_medians() -> None:
    """Oracle: scipy on the stored samples."""
    timings, _ = run_noisy(TimingConfig(max_rounds=9), spread=0.2)
    t = timings["a"]
    rounds = np.array(t.rounds)
    logs = [np.log(np.median(np.array(t.samples_ms)[rounds == r])) for r in sorted(set(t.rounds))]
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs)
    assert t.rel_half_width == pytest.approx(np.expm1(half), rel=1e-9)


def test_a_slow_arm_gets_fewer_samples_rather_than_fewer_rounds(fake_time: FakeTime) -> None:
    """0.5 s a call, 5 s cap, 8 rounds: one sample in each round, so that 8 rounds fit."""
    config = TimingConfig(warmup_min_seconds=0.0, rel_half_width=1e-9)
    timings = measure({"a": lambda: fake_time.sleep(0.5)}, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["a"].rounds == tuple(range(10))
    assert timings["a"].stop_reason == "time_cap"


def test_warm_up_waits_until_the_clock_is_steady_or_its_cap_is_spent(fake_time: FakeTime) -> None:
    """A card that climbs from 345 to 1980 MHz: samples begin after ten readings within 2 %."""
    climb = [345.0, 800.0, 1200.0, 1600.0, 1900.0, 1980.0, 1965.0]
    monitor = WatchedMonitor(forever(*climb))
    restless = WatchedMonitor(itertools.cycle((1000.0, 1980.0)))
    config = replace(QUICK, min_samples=3)
    timings = measure(
        {"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), config, 0, monitor, fake_time
    )
    assert timings["a"].warmup_rule == "clock_stable"
    assert timings["a"].warmup_iterations == 5 + 10, "the climb, then a full window from 1980 on"
    assert timings["a"].sample_clock_mhz == (1965.0,) * 3
    config = replace(QUICK, warmup_max_seconds=2.0)
    (t,) = measure(
        {"a": lambda: fake_time.sleep(1e-2)}, CpuTimer(fake_time), config, 0, restless, fake_time
    ).values()
    assert t.warmup_rule == "time_cap"
    assert t.warmup_seconds == pytest.approx(2.0, abs=0.011)


def test_throttled_rounds_are_tagged_and_nothing_is_dropped(fake_time: FakeTime) -> None:
    """Reasons that hold the clock down count; idling and a set clock do not."""
    reasons: Iterator[set[str]] = iter(
        [{"gpu_idle"}, {"applications_clocks"}, {"sw_power_cap", "gpu_idle"}, set()]
    )
    config = replace(QUICK, min_rounds=3, max_rounds=3, min_samples=6, warmup_max_seconds=0.0005)
    monitor = WatchedMonitor(forever(1000.0, 1980.0, None, 1965.0), reasons)
    (t,) = measure(
        {"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), config, 0, monitor, fake_time
    ).values()
    clocks = t.sample_clock_mhz
    assert (clocks[:2], clocks[4:]) == ((1980.0,) * 2, (1965.0,) * 2)
    assert all(map(math.isnan, clocks[2:4])), "a missing reading is no number"
    assert (t.throttled, t.throttle_reasons, t.throttled_rounds) == (True, ("sw_power_cap",), (1,))
    assert len(t.samples_ms) == 6


class DisturbedTimer(CpuTimer):
    """Says of one block after the other what it is given, of later ones nothing."""

    def __init__(self, clock: FakeTime, said: list[str]) -> None:
        super().__init__(clock)
        self.said = said

    def block(self, *args: Any, **named: Any) -> list[float]:
        self.disturbed = self.said.pop(0) if self.said else ""
        return super().block(*args, **named)


def test_a_round_over_which_a_process_was_stopped_is_made_again(fake_time: FakeTime) -> None:
    """And one in which it waited for a core is marked, for all arms."""
    config = replace(QUICK, min_rounds=3, max_rounds=3)
    timer = DisturbedTimer(fake_time, ["", "stopped", "", "", "", "stopped", "contended", "", "", ""])
    calls = {"a": lambda: fake_time.sleep(1e-3), "b": lambda: fake_time.sleep(1e-3)}
    for timed in measure(
        calls, timer, replace(config, warmup_min_iterations=1, warmup_min_seconds=0.0), 0, clock=fake_time
    ).values():
        assert (timed.stopped_rounds, timed.contended_rounds) == (1, (1,))
        assert sorted(set(timed.rounds)) == [0, 1, 2]
        assert len(timed.samples_ms) == len(timed.rounds) == 3 * timed.rounds.count(0)


def test_the_whole_cuda_path_on_fakes(fake_cuda: FakeCuda, fake_nvml: FakeNvml) -> None:
    """Events, flush, holds, NVTX and NVML together: two kernels read as their device lengths."""
    fake_nvml.sm_clocks = iter([345, 900, 1500, *([1980] * 10_000)])
    fake_nvml.events = 0x4
    clock = fake_cuda.time
    arms = {
        "bf16": fake_cuda.kernel(120e-6, 8e-6, cached_s=100e-6),
        "fp8": fake_cuda.kernel(70e-6, 60e-6, cached_s=50e-6),
    }
    timer = CudaTimer(fake_cuda, allocate=fake_cuda.allocate, clock=clock)
    with GpuMonitor(uuid=fake_nvml.UUID, nvml=fake_nvml) as monitor:
        timings = measure(arms, timer, TimingConfig(), 0, monitor, clock)
        sustained = measure_sustained(
            {n: [f] * 3 for n, f in arms.items()}, timer, TimingConfig(), 0, monitor, clock
        )
    assert timings["bf16"].samples_ms == pytest.approx([0.120] * len(timings["bf16"].samples_ms))
    assert timings["fp8"].samples_ms == pytest.approx([0.070] * len(timings["fp8"].samples_ms))
    for t in timings.values():
        assert (t.method, t.l2, t.stop_reason, t.warmup_rule) == (
            "cuda_events",
            "cold",
            "converged",
            "clock_stable",
        )
        assert set(t.sample_clock_mhz) == {1980.0}
        assert t.throttle_reasons == ("sw_power_cap",)
        assert t.contended is False
        assert t.late_samples == 0
    # Sustained: operands stay in this fake's cache, and fp8 is bound by its 60 us launches.
    assert sustained["bf16"].samples_ms == pytest.approx(
        [0.100] * len(sustained["bf16"].samples_ms), rel=0.01
    )
    assert sustained["fp8"].samples_ms == pytest.approx([0.060] * len(sustained["fp8"].samples_ms), rel=0.01)
    for t in sustained.values():
        assert (t.regime, t.method, t.l2) == ("sustained", "cuda_events_mean", "rotating")
        assert set(t.rounds) == {0, 1, 2, 3}
        assert t.seconds == pytest.approx(2.0, rel=0.1)
        assert t.warmup_rule == "lead_in"
    assert {"bf16", "fp8"} == set(fake_cuda.ranges)


def test_a_failing_arm_leaves_the_sustained_rounds(fake_time: FakeTime) -> None:
    calls = iter(range(10**6))

    def bad() -> None:
        if next(calls) == 600:
            raise RuntimeError("CUDA error: unspecified launch failure")
        fake_time.sleep(1e-3)

    arms = {"bad": [bad], "good": [lambda: fake_time.sleep(1e-3)]}
    timings = measure_sustained(arms, CpuTimer(fake_time), TimingConfig(), clock=fake_time)
    assert timings["bad"].failure == "RuntimeError: CUDA error: unspecified launch failure"
    assert timings["bad"].samples_ms == ()
    assert set(timings["good"].rounds) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_rounds": 0}, r"timing.min_rounds=0: must be finite and at least 1"),
        ({"max_rounds": 3}, r"timing.min_rounds=8 is above timing.max_rounds=3"),
        ({"min_seconds": 9.0}, r"timing.min_seconds=9.0 is above timing.max_seconds=5.0"),
        ({"rel_half_width": math.nan}, r"timing.rel_half_width=nan: must be finite"),
        ({"max_seconds": 0.0, "min_seconds": 0.0}, r"timing.max_seconds=0: must be above 0"),
        ({"max_seconds": math.inf}, r"timing.max_seconds=inf: must be finite"),
        (
            {"warmup_min_seconds": 6.0},
            r"timing.warmup_min_seconds=6.0 is above timing.warmup_max_seconds=5.0",
        ),
    ],
)
def test_a_senseless_configuration_is_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimingConfig(**changes)


# Calls that are too short for one pair of events


def short_arms(
    cuda: FakeCuda, us: float
) -> tuple[dict[str, Callable[[], None]], dict[str, list[Callable[[], None]]]]:
    """Two arms, the second 2 % slower, and four operand sets of each."""
    made = {"a": us * 1e-6, "b": 1.02 * us * 1e-6}
    closures = {name: cuda.kernel(s, 2e-6) for name, s in made.items()}
    return closures, {name: [cuda.kernel(s, 2e-6) for _ in range(4)] for name, s in made.items()}


class Rounded(FakeCuda):
    """A device whose events tell half a microsecond."""

    def Event(self, enable_timing: bool = False) -> Any:  # noqa: N802 -- torch's name
        event = super().Event(enable_timing)
        exact = event.elapsed_time
        event.elapsed_time = lambda end: round(exact(end) / 5e-4) * 5e-4  # type: ignore[method-assign]
        return event


@pytest.mark.parametrize(("us", "rotates"), [(5.2, True), (49.0, True), (51.0, False), (400.0, False)])
def test_below_50_us_several_calls_make_a_sample_over_rotated_operands(us: float, rotates: bool) -> None:
    """A kernel of 5.2 us and one 2 % slower: single pairs of events of 0.5 us call them equal, or 10 % apart."""
    cuda = Rounded()
    arms, rotations = short_arms(cuda, us)
    timer = CudaTimer(cuda, allocate=cuda.allocate, clock=cuda.time, hold=FakeHold(cuda))
    config = TimingConfig(min_rounds=4, max_rounds=4, min_seconds=0.0, warmup_min_seconds=0.0)
    found = measure(arms, timer, config, clock=cuda.time, rotations=rotations)
    a, b = found["a"], found["b"]
    assert (a.l2, a.method) == (("rotating", "cuda_events_mean") if rotates else ("cold", "cuda_events"))
    assert (a.calls_per_sample > 1) == rotates
    assert len(a.samples_ms) > 2 * config.min_samples, "blocks are filled"
    assert a.resolution_ms == pytest.approx(5e-4 / a.calls_per_sample)
    assert a.resolution_ms <= 0.012 * us * 1e-3
    assert a.hold == "kernel released by the host"
    assert (a.late_samples, a.short) == (0, "")
    ratio = statistics.median(b.samples_ms) / statistics.median(a.samples_ms)
    assert ratio == pytest.approx(1.02, abs=0.004 if rotates else 0.01)


def test_operands_that_cannot_fill_the_cache_twice_are_measured_as_before_and_say_so() -> None:
    cuda = Rounded()
    arms, rotations = short_arms(cuda, 5.2)
    timer = CudaTimer(cuda, allocate=cuda.allocate, clock=cuda.time)
    del rotations["b"]
    config = TimingConfig(min_rounds=2, max_rounds=2, min_seconds=0.0, warmup_min_seconds=0.0)
    found = measure(arms, timer, config, clock=cuda.time, rotations=rotations)
    for timing in found.values():
        assert (timing.l2, timing.calls_per_sample) == ("cold", 1)
        assert timing.short == "operands of b cannot fill twice the last cache"
        assert timing.resolution_ms == 5e-4
        assert timing.hold.startswith("sleep of an assumed clock")


ROUNDS = TimingConfig(
    min_rounds=4, max_rounds=4, min_samples=4, min_seconds=0.0, block_ms=10.0, warmup_min_seconds=0.0
)


class Meter(Monitor):
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


def test_in_bursts_the_device_rests_before_each_step_and_no_energy_is_read(
    fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the log of calls. A rest before each sample, none inside one, and what it takes is in none."""
    held, config = Held(fake_time), replace(ROUNDS, pause_s=0.5, max_seconds=1e3)

    def rest(seconds: float) -> None:
        held.log.append("rest")
        fake_time.sleep(seconds)

    monkeypatch.setattr("harness.timing.rounds.time.sleep", rest)
    arms, resident, meter = {"a": held.arm("a", 2.0)}, {"a": held.resident("a")}, Meter(fake_time, 500.0)
    (timing,) = measure(arms, CpuTimer(fake_time), config, 0, meter, fake_time, resident=resident).values()
    assert timing.samples_ms == pytest.approx([2.0] * 20)
    assert (timing.method, timing.pause_s, timing.joules) == ("perf_counter_bursts", 0.5, ())
    assert timing.as_json_dict()["pause_s"] == 0.5
    last = " ".join(held.log).split("+a")[-1].split()
    assert last == [*["a"] * 2, *["rest", "a"] * 5, "-a"]


def test_in_bursts_a_block_of_kernels_rests_once(
    fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr("harness.timing.rounds.time.sleep", rests.append)
    arms = {"a": lambda: fake_time.sleep(1e-3), "b": lambda: fake_time.sleep(2e-3)}
    timings = measure(arms, CpuTimer(fake_time), replace(ROUNDS, pause_s=0.25), clock=fake_time)
    assert rests == [0.25] * 4 * 2
    assert len(timings["a"].samples_ms) > len(timings["b"].samples_ms) > 4


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


class WatchedMonitor(Monitor):
    """A monitor that says what the test tells it to, one answer per reading."""

    def __init__(self, clocks: Iterator[float | None], reasons: Iterator[set[str]] | None = None) -> None:
        self.clocks, self.reasons = clocks, reasons
        self.answers: list[bool | None] = [False, False]

    def sm_clock_mhz(self) -> float | None:
        return next(self.clocks)

    def throttle_reasons(self) -> frozenset[str] | None:
        return frozenset(next(self.reasons)) if self.reasons else None

    def contended(self) -> bool | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


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
