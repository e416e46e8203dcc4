"""Rounds, warm-up and the rule that ends them. Oracle: scipy's t interval, clocks that move only when told to."""

from __future__ import annotations

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

from timing_noise import QUICK, Noise, WatchedMonitor, forever, run_noisy


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
