"""What a timing notes of its conditions, sustained rounds, and calls too short for one pair of events."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeCuda, FakeHold, FakeNvml, FakeTime

from harness.machine.gpu_monitor import GpuMonitor
from harness.store.measurement import to_json
from harness.timing.rounds import TimingConfig, measure, measure_sustained
from harness.timing.timers import CpuTimer, CudaTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

from timing_noise import QUICK, Noise, WatchedMonitor, forever, run_noisy


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
