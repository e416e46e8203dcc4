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


def test_quiet_arms_converge_at_the_minimum(fake_time: FakeTime) -> None:
    """0.1 % noise is far inside 0.5 %: 8 rounds, or as many as 0.25 s need; never fewer than 30 samples."""
    timings, _ = run_noisy(TimingConfig())
    for name, ms in (("a", 2.0), ("b", 3.0)):
        t = timings[name]
        assert t.stop_reason == "converged"
        assert statistics.median(t.samples_ms) == pytest.approx(ms, rel=0.005)
        assert len(t.samples_ms) >= 30
        assert t.seconds >= 0.25
        assert t.rel_half_width is not None
        assert t.rel_half_width < 0.005
        assert t.failure == ""
        assert t.regime == "isolated"
        assert (t.method, t.l2, t.calls_per_sample) == ("perf_counter", "none", 1)
        assert len(t.rounds) == len(t.samples_ms)
        assert list(t.rounds) == sorted(t.rounds)
        assert set(t.rounds) == set(timings["a"].rounds) == set(range(max(t.rounds) + 1))


@pytest.mark.parametrize(
    ("config", "cap"),
    [
        (TimingConfig(max_rounds=20, max_seconds=100.0), "sample_cap"),
        (TimingConfig(max_rounds=10_000, max_seconds=1.0), "time_cap"),
    ],
)
def test_each_arm_stores_its_own_reason(fake_time: FakeTime, config: TimingConfig, cap: str) -> None:
    """A quiet arm beside a noisy one has converged, although the rounds went on."""
    noise = Noise(fake_time)
    arms = {"quiet": noise.arm("quiet", 2.0, 1e-4), "noisy": noise.arm("noisy", 2.0, 0.8)}
    timings = measure(arms, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["quiet"].stop_reason == "converged"
    if cap == "time_cap":  # one second an arm: the rounds end where two are spent, warm-up apart
        spent = sum(t.seconds for t in timings.values())
        assert 2.0 <= spent <= 2.0 + 2 * spent / (max(timings["quiet"].rounds) + 1)
    assert timings["noisy"].stop_reason == cap
    assert max(timings["quiet"].rounds) == max(timings["noisy"].rounds)


def test_half_width_is_that_of_the_t_interval_of_log_round_medians() -> None:
    """Oracle: scipy on the stored samples."""
    timings, _ = run_noisy(TimingConfig(max_rounds=9), spread=0.2)
    t = timings["a"]
    rounds = np.array(t.rounds)
    logs = [np.log(np.median(np.array(t.samples_ms)[rounds == r])) for r in sorted(set(t.rounds))]
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs)
    assert t.rel_half_width == pytest.approx(np.expm1(half), rel=1e-9)


def test_a_drift_between_rounds_is_not_mistaken_for_precision(fake_time: FakeTime) -> None:
    """Identical samples within a round, 10 % between rounds: 200 samples must not pass for 200 readings."""
    level = {"ms": 2.0}
    rounds = iter(range(10_000))

    class Drifting(CpuTimer):
        @contextmanager
        def annotate(self, name: str) -> Iterator[None]:
            level["ms"] = 2.0 * 1.1 ** (next(rounds) % 2)
            yield

    timings = measure(
        {"a": lambda: fake_time.sleep(1e-3 * level["ms"])},
        Drifting(fake_time),
        TimingConfig(max_rounds=20, max_seconds=1e4),
        clock=fake_time,
    )
    assert len(timings["a"].samples_ms) >= 100
    assert timings["a"].stop_reason == "sample_cap"
    width = timings["a"].rel_half_width
    assert width is not None
    assert width > 0.01


def test_order_is_drawn_anew_each_round_and_repeats_with_the_seed() -> None:
    def order(seed: int) -> list[str]:
        _, noise = run_noisy(replace(QUICK, min_rounds=20, max_rounds=20), seed=seed)
        return noise.calls

    assert order(1) == order(1)
    assert order(1) != order(2)
    rounds = order(1)[2:]  # each block stands together; the warm-up is one call of each
    pairs = [tuple(rounds[i : i + 2]) for i in range(0, len(rounds), 2)]
    assert {tuple(sorted(p)) for p in pairs} == {("a", "b")}, "each round has each arm once"
    assert 5 <= sum(p == ("a", "b") for p in pairs) <= 15


def test_short_calls_are_grouped_and_the_group_is_stated(fake_time: FakeTime) -> None:
    """A 0.1 us call against a clock that resolves 0.1 us: a sample must span at least 50 steps."""
    arms = {"short": lambda: fake_time.sleep(1e-7), "long": lambda: fake_time.sleep(1e-3)}
    timings = measure(arms, CpuTimer(fake_time), replace(QUICK, min_samples=4), clock=fake_time)
    assert timings["short"].calls_per_sample in (50, 51)  # the fake clock's own rounding decides
    assert timings["short"].samples_ms == pytest.approx([1e-4] * 4)
    assert timings["long"].calls_per_sample == 1


def test_a_slow_arm_gets_fewer_samples_rather_than_fewer_rounds(fake_time: FakeTime) -> None:
    """0.5 s a call, 5 s cap, 8 rounds: one sample in each round, so that 8 rounds fit."""
    config = TimingConfig(warmup_min_seconds=0.0, rel_half_width=1e-9)
    timings = measure({"a": lambda: fake_time.sleep(0.5)}, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["a"].rounds == tuple(range(10))
    assert timings["a"].stop_reason == "time_cap"


def test_ctrl_c_is_not_a_failure_of_an_arm(fake_time: FakeTime) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure({"a": interrupted}, CpuTimer(fake_time), QUICK, clock=fake_time)


def test_warm_up_without_a_clock_reading_ends_by_time_and_count() -> None:
    timings, _ = run_noisy(replace(QUICK, warmup_min_seconds=0.5, block_ms=20.0))
    assert {t.warmup_rule for t in timings.values()} == {"no_clock"}
    assert sum(t.warmup_seconds for t in timings.values()) >= 0.5
    timings, noise = run_noisy(replace(QUICK, warmup_min_iterations=7))
    assert timings["a"].warmup_iterations >= 7
    assert noise.calls.count("b") >= 8


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


@pytest.mark.parametrize(
    ("error", "at", "failure"),
    [
        (ArithmeticError("lost its mind"), 6, "ArithmeticError: lost its mind"),
        (MemoryError("CUDA out of memory"), 0, "out of memory: CUDA out of memory"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_an_arm_that_raises_is_dropped_and_the_others_go_on(
    fake_time: FakeTime, error: Exception, at: int, failure: str, alone: bool
) -> None:
    calls = itertools.count()

    def bad() -> None:
        if next(calls) >= at:
            raise error
        fake_time.sleep(1e-3)

    config = replace(QUICK, min_rounds=8, max_rounds=8, min_samples=8)
    arms = {"bad": bad} | ({} if alone else {"good": lambda: fake_time.sleep(1e-3)})
    timings = measure(arms, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["bad"].failure == failure
    assert timings["bad"].samples_ms == timings["bad"].rounds == timings["bad"].sample_clock_mhz == ()
    assert next(calls) == at + 1, "not called again after it failed"
    if not alone:
        assert timings["good"].failure == ""
        assert timings["good"].rounds == tuple(range(8))


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


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(False, False, False), (False, True, True), (True, False, True), (None, None, None), (None, True, True)],
)
def test_contention_is_looked_for_before_the_first_round_and_after_each(
    fake_time: FakeTime, before: bool | None, after: bool | None, expected: bool | None
) -> None:
    monitor = WatchedMonitor(forever(None))
    monitor.answers = [before, after]
    timings = measure({"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), QUICK, 0, monitor, fake_time)
    assert timings["a"].contended is expected
    assert bool(timings["a"].contended_rounds) == bool(after)


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


def test_sustained_runs_rotate_and_interleave(fake_time: FakeTime) -> None:
    """Four rounds of 0.5 s an arm after 0.2 s of lead-in; each operand set is used equally often."""
    used: list[str] = []

    def closure(name: str) -> Callable[[], None]:
        def run() -> None:
            used.append(name)
            fake_time.sleep(1e-3)

        return run

    arms = {"a": [closure("a0"), closure("a1"), closure("a2")], "b": [closure("b0")]}
    timings = measure_sustained(arms, CpuTimer(fake_time), TimingConfig(), 3, clock=fake_time)
    a, b = timings["a"], timings["b"]
    counts = [used.count(name) for name in ("a0", "a1", "a2")]
    assert max(counts) - min(counts) <= 1, (
        "the first call shows how long one takes; from then on, whole turns"
    )
    assert (a.l2, b.l2) == ("rotating", "warm")
    assert (a.method, a.regime) == ("perf_counter_mean", "sustained")
    assert a.calls_per_sample % 3 == 0
    assert a.samples_ms == pytest.approx([1.0] * len(a.samples_ms))
    assert set(a.rounds) == set(b.rounds) == {0, 1, 2, 3}
    for t in (a, b):
        assert t.seconds == pytest.approx(2.0, rel=0.05)
        assert t.warmup_seconds == pytest.approx(4 * 0.2, rel=0.05)
        assert t.stop_reason == "converged"
    switches = sum(x[0] != y[0] for x, y in itertools.pairwise(used[2:]))
    assert 3 <= switches <= 7, "eight runs in random order: arms alternate by run"


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
