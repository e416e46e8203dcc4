"""Timing policy. Oracles: a fake clock, a simulated device and fake NVML; no test asserts a real duration."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import scipy.stats
from fakes import FakeCuda, FakeHold, FakeNvml, FakeTime

from harness.machine.gpu_monitor import GpuMonitor, NullMonitor
from harness.store.measurement import to_json
from harness.timing.rounds import Timing, TimingConfig, measure, measure_sustained
from harness.timing.timers import CpuTimer, CudaTimer

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


def test_arms_share_their_rounds_and_every_sample_has_one() -> None:
    timings, _ = run_noisy(TimingConfig())
    a, b = timings["a"], timings["b"]
    assert len(a.rounds) == len(a.samples_ms)
    assert sorted(set(a.rounds)) == sorted(set(b.rounds)) == list(range(max(a.rounds) + 1))
    assert list(a.rounds) == sorted(a.rounds)


def test_noisy_arms_end_at_the_round_cap_and_say_so() -> None:
    timings, _ = run_noisy(TimingConfig(max_rounds=9, max_seconds=100.0), spread=0.5)
    assert {t.stop_reason for t in timings.values()} == {"sample_cap"}
    assert max(timings["a"].rounds) == 8
    width = timings["a"].rel_half_width
    assert width is not None
    assert width > 0.005


def test_noisy_arms_end_at_the_time_cap_and_say_so() -> None:
    """One second per arm: the case ends in the round in which two are spent, warm-up apart."""
    clock = FakeTime()
    noise = Noise(clock)
    arms = {"a": noise.arm("a", 40.0, 0.5), "b": noise.arm("b", 40.0, 0.5)}
    config = TimingConfig(max_seconds=1.0, min_seconds=0.1, warmup_min_seconds=0.0, rel_half_width=1e-6)
    timings = measure(arms, CpuTimer(clock), config, clock=clock)
    assert {t.stop_reason for t in timings.values()} == {"time_cap"}
    spent = sum(t.seconds for t in timings.values())
    one_round = spent / (max(timings["a"].rounds) + 1)
    assert 2.0 <= spent <= 2.0 + 2 * one_round


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

    @contextmanager
    def step(name: str) -> Iterator[None]:
        level["ms"] = 2.0 * 1.1 ** (next(rounds) % 2)
        yield

    timings = measure(
        {"a": lambda: fake_time.sleep(1e-3 * level["ms"])},
        CpuTimer(fake_time),
        TimingConfig(max_rounds=20, max_seconds=1e4),
        clock=fake_time,
        annotate=step,
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
    rounds = order(1)[2:]  # the warm-up is one call of each
    pairs = [tuple(rounds[i : i + 2]) for i in range(0, len(rounds), 2)]
    assert {tuple(sorted(p)) for p in pairs} == {("a", "b")}, "each round has each arm once"
    assert 5 <= sum(p == ("a", "b") for p in pairs) <= 15


def test_blocks_of_one_round_stand_together() -> None:
    """Within a round an arm's samples form one block, so arms alternate by round, not by sample."""
    _, noise = run_noisy(replace(QUICK, min_samples=3, warmup_min_iterations=1))
    assert noise.calls[2:] in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3)


def test_the_quickest_configuration_takes_one_sample() -> None:
    timings, noise = run_noisy(QUICK)
    assert [len(t.samples_ms) for t in timings.values()] == [1, 1]
    assert noise.calls.count("a") == 2, "one call to warm up, one sample"
    assert timings["a"].stop_reason == "sample_cap"
    assert timings["a"].rel_half_width is None


def test_no_arms_give_no_timings(fake_time: FakeTime) -> None:
    assert measure({}, CpuTimer(fake_time), TimingConfig(), clock=fake_time) == {}
    assert measure_sustained({}, CpuTimer(fake_time), TimingConfig(), clock=fake_time) == {}


def test_short_calls_are_grouped_and_the_group_is_stated(fake_time: FakeTime) -> None:
    """A 0.1 us call against a clock that resolves 0.1 us: a sample must span at least 50 steps."""
    arms = {"short": lambda: fake_time.sleep(1e-7), "long": lambda: fake_time.sleep(1e-3)}
    timings = measure(arms, CpuTimer(fake_time), replace(QUICK, min_samples=4), clock=fake_time)
    assert timings["short"].calls_per_sample in (50, 51)  # the fake clock's own rounding decides
    assert timings["short"].samples_ms == pytest.approx([1e-4] * 4)
    assert timings["long"].calls_per_sample == 1


def test_a_call_that_reads_as_nothing_still_ends() -> None:
    """On a clock that never moves every sample is 0; the rounds end at their cap, without an interval."""
    frozen = FakeTime()
    config = TimingConfig(warmup_min_seconds=0.0, min_seconds=0.0, max_rounds=9, block_ms=0.1)
    timings = measure({"a": lambda: None}, CpuTimer(frozen), config, clock=frozen)
    assert set(timings["a"].samples_ms) == {0.0}
    assert timings["a"].stop_reason == "sample_cap"
    assert timings["a"].rel_half_width is None


def test_cold_samples_are_never_grouped(fake_cuda: FakeCuda) -> None:
    """A second call inside of a sample would find its operands in cache."""
    timer = CudaTimer(fake_cuda, allocate=fake_cuda.allocate, clock=fake_cuda.time)
    launch = fake_cuda.kernel(3e-6, cached_s=1e-6)
    timings = measure({"a": launch}, timer, replace(QUICK, min_samples=5), clock=fake_cuda.time)
    assert timings["a"].calls_per_sample == 1
    assert timings["a"].samples_ms == pytest.approx([0.003] * 5)


def test_a_slow_arm_gets_fewer_samples_rather_than_fewer_rounds(fake_time: FakeTime) -> None:
    """0.5 s a call, 5 s cap, 8 rounds: one sample in each round, so that 8 rounds fit."""
    config = TimingConfig(warmup_min_seconds=0.0, rel_half_width=1e-9)
    timings = measure({"a": lambda: fake_time.sleep(0.5)}, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["a"].rounds == tuple(range(10))
    assert timings["a"].stop_reason == "time_cap"


def test_an_arm_that_raises_is_dropped_and_the_others_go_on(fake_time: FakeTime) -> None:
    calls = {"bad": 0}

    def bad() -> None:
        calls["bad"] += 1
        if calls["bad"] > 6:
            raise ArithmeticError("lost its mind")
        fake_time.sleep(1e-3)

    config = replace(QUICK, min_rounds=8, max_rounds=8, min_samples=8)
    arms = {"bad": bad, "good": lambda: fake_time.sleep(1e-3)}
    timings = measure(arms, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["bad"].failure == "ArithmeticError: lost its mind"
    assert timings["bad"].samples_ms == timings["bad"].rounds == timings["bad"].sample_clock_mhz == ()
    assert calls["bad"] == 7, "not called again after it failed"
    assert timings["good"].failure == ""
    assert timings["good"].rounds == tuple(range(8))


def test_an_arm_that_fails_at_once_ends_the_case(fake_time: FakeTime) -> None:
    def bad() -> None:
        raise MemoryError("CUDA out of memory")

    timings = measure({"bad": bad}, CpuTimer(fake_time), TimingConfig(), clock=fake_time)
    assert timings["bad"].failure == "out of memory: CUDA out of memory"
    assert timings["bad"].warmup_iterations == 0


def test_an_arm_whose_last_round_fails_ends_the_rounds(fake_time: FakeTime) -> None:
    calls = iter(range(100))

    def bad() -> None:
        if next(calls) == 3:
            raise RuntimeError("CUDA error")
        fake_time.sleep(1e-3)

    config = replace(QUICK, min_rounds=5, max_rounds=9)
    timings = measure({"bad": bad}, CpuTimer(fake_time), config, clock=fake_time)
    assert timings["bad"].failure == "RuntimeError: CUDA error"
    assert next(calls) == 4


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


def test_warm_up_waits_until_the_clock_is_steady(fake_time: FakeTime) -> None:
    """A card that climbs from 345 to 1980 MHz: samples begin after ten readings within 2 %."""
    climb = [345.0, 800.0, 1200.0, 1600.0, 1900.0, 1980.0, 1965.0]
    monitor = WatchedMonitor(forever(*climb))
    config = replace(QUICK, min_samples=3)
    timings = measure(
        {"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), config, 0, monitor, fake_time
    )
    assert timings["a"].warmup_rule == "clock_stable"
    assert timings["a"].warmup_iterations == 5 + 10, "the climb, then a full window from 1980 on"
    assert timings["a"].sample_clock_mhz == (1965.0,) * 3


def test_warm_up_of_a_restless_clock_ends_at_the_cap(fake_time: FakeTime) -> None:
    def restless() -> Iterator[float | None]:
        while True:
            yield from (1000.0, 1980.0)

    timings = measure(
        {"a": lambda: fake_time.sleep(1e-2)},
        CpuTimer(fake_time),
        replace(QUICK, warmup_max_seconds=2.0),
        0,
        WatchedMonitor(restless()),
        fake_time,
    )
    assert timings["a"].warmup_rule == "time_cap"
    assert timings["a"].warmup_seconds == pytest.approx(2.0, abs=0.011)


def test_clock_of_each_block_is_kept_and_a_missing_reading_is_not_a_number(fake_time: FakeTime) -> None:
    config = replace(QUICK, min_rounds=3, max_rounds=3, min_samples=6, warmup_max_seconds=0.0005)
    monitor = WatchedMonitor(forever(1000.0, 1980.0, None, 1965.0))
    timings = measure(
        {"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), config, 0, monitor, fake_time
    )
    clocks = timings["a"].sample_clock_mhz
    assert clocks[:2] == (1980.0, 1980.0)
    assert all(map(math.isnan, clocks[2:4]))
    assert clocks[4:] == (1965.0, 1965.0)


def test_throttled_rounds_are_tagged_and_nothing_is_dropped(fake_time: FakeTime) -> None:
    """Reasons that hold the clock down count; idling and a set clock do not."""
    reasons: Iterator[set[str]] = iter(
        [{"gpu_idle"}, {"applications_clocks"}, {"sw_power_cap", "gpu_idle"}, set()]
    )
    config = replace(QUICK, min_rounds=3, max_rounds=3, min_samples=6, warmup_max_seconds=0.0005)
    monitor = WatchedMonitor(forever(1980.0), reasons)
    timings = measure(
        {"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), config, 0, monitor, fake_time
    )
    t = timings["a"]
    assert (t.throttled, t.throttle_reasons, t.throttled_rounds) == (True, ("sw_power_cap",), (1,))
    assert len(t.samples_ms) == 6


def test_throttling_explains_an_arm_that_did_not_converge() -> None:
    """And does not hide that one did."""
    for spread, expected in ((0.5, "throttled"), (1e-4, "converged")):
        clock = FakeTime()
        monitor = WatchedMonitor(forever(1980.0), iter(lambda: {"hw_slowdown"}, None))
        timings = measure(
            {"a": Noise(clock).arm("a", 2.0, spread)},
            CpuTimer(clock),
            TimingConfig(max_rounds=10, max_seconds=100.0, min_seconds=0.1),
            monitor=monitor,
            clock=clock,
        )
        assert timings["a"].stop_reason == expected
        assert timings["a"].throttled


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(False, False, False), (False, True, True), (True, False, True), (None, None, None), (None, True, True)],
)
def test_contention_is_looked_for_before_and_after(
    fake_time: FakeTime, before: bool | None, after: bool | None, expected: bool | None
) -> None:
    monitor = WatchedMonitor(forever(None))
    monitor.answers = [before, after]
    timings = measure({"a": lambda: fake_time.sleep(1e-3)}, CpuTimer(fake_time), QUICK, 0, monitor, fake_time)
    assert timings["a"].contended is expected


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


def test_late_samples_are_counted(fake_cuda: FakeCuda) -> None:
    timer = CudaTimer(fake_cuda, allocate=fake_cuda.allocate, clock=fake_cuda.time)
    config = replace(QUICK, min_rounds=2, max_rounds=2, min_samples=6)
    timings = measure({"slow_host": fake_cuda.kernel(1e-6, 20e-3)}, timer, config, clock=fake_cuda.time)
    assert timings["slow_host"].late_samples == len(timings["slow_host"].samples_ms) == 6


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


def test_sustained_of_a_call_longer_than_a_run_takes_single_calls(fake_time: FakeTime) -> None:
    arms = {"a": [lambda: fake_time.sleep(1.0)] * 3}
    timings = measure_sustained(arms, CpuTimer(fake_time), TimingConfig(), clock=fake_time)
    assert timings["a"].calls_per_sample == 1
    assert timings["a"].samples_ms == pytest.approx([1000.0, 1000.0])
    assert timings["a"].rounds == (0, 1), (
        "one call to learn, then a lead-in and a sample a round: 5 s are spent"
    )
    assert timings["a"].stop_reason == "time_cap"


def test_sustained_stops_at_its_time_cap(fake_time: FakeTime) -> None:
    random_ms = random.Random(0)
    arms = {"a": [lambda: fake_time.sleep(0.4 + 0.2 * random_ms.random())]}
    timings = measure_sustained(
        arms, CpuTimer(fake_time), replace(TimingConfig(), max_seconds=1.0), clock=fake_time
    )
    assert timings["a"].stop_reason == "time_cap"
    assert max(timings["a"].rounds) < 3


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
    only = measure_sustained({"bad": [_always_broken]}, CpuTimer(fake_time), TimingConfig(), clock=fake_time)
    assert only["bad"].failure == "ValueError: never works"


def _always_broken() -> None:
    raise ValueError("never works")


def test_an_arm_without_closures_is_refused(fake_time: FakeTime) -> None:
    with pytest.raises(ValueError, match="arm 'a' has no closure to run"):
        measure_sustained({"a": []}, CpuTimer(fake_time), TimingConfig(), clock=fake_time)


def test_the_timing_column_is_json_without_what_has_its_own_column() -> None:
    timings, _ = run_noisy(QUICK)
    column = timings["a"].as_json_dict()
    assert set(column) == set(asdict(timings["a"])) - {
        *("samples_ms", "rounds", "sample_clock_mhz", "regime", "failure", "cause", "joules", "split_ms"),
    }
    assert '"stop_reason":"sample_cap"' in to_json(column)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_rounds": 0}, r"timing.min_rounds=0: must be finite and at least 1"),
        ({"max_rounds": 3}, r"timing.min_rounds=8 is above timing.max_rounds=3"),
        ({"min_samples": 0}, r"timing.min_samples=0"),
        ({"min_seconds": -1.0}, r"timing.min_seconds=-1.0: must be finite and at least 0"),
        ({"min_seconds": 9.0}, r"timing.min_seconds=9.0 is above timing.max_seconds=5.0"),
        ({"max_seconds": 0.0, "min_seconds": 0.0}, r"timing.max_seconds=0: must be above 0"),
        ({"rel_half_width": 0.0}, r"timing.rel_half_width=0: must be above 0"),
        ({"rel_half_width": math.nan}, r"timing.rel_half_width=nan: must be finite"),
        ({"max_seconds": math.inf}, r"timing.max_seconds=inf: must be finite"),
        (
            {"warmup_min_seconds": 6.0},
            r"timing.warmup_min_seconds=6.0 is above timing.warmup_max_seconds=5.0",
        ),
        ({"clock_window": 1}, r"timing.clock_window=1: must be finite and at least 2"),
        ({"sustained_max_cases": -1}, r"timing.sustained_max_cases=-1"),
    ],
)
def test_a_senseless_configuration_is_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimingConfig(**changes)


@pytest.mark.benchmark_bar
def test_bookkeeping_of_a_case_is_under_two_milliseconds() -> None:
    """1,000 trivial cases of two arms: time outside of the closures, at the median. Run by `make bench`."""
    spent = []
    for seed in range(1000):
        begin = time.perf_counter()
        measure({"a": int, "b": int}, CpuTimer(), QUICK, seed)
        spent.append(time.perf_counter() - begin)
    assert statistics.median(spent) < 2e-3


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
