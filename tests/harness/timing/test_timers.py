"""Timers. Oracle: a simulated device (`fakes.FakeCuda`); the test sets kernel lengths and host costs."""

from __future__ import annotations

import gc
import itertools
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakeCuda, FakeHold, FakeTime

from harness.timing import timers
from harness.timing.clock import HostClock, Split, gc_paused
from harness.timing.timers import CpuTimer, CudaTimer, HostReleased, RanksTimer, Sleep, hold_for, timer_for


def cuda_timer(cuda: FakeCuda, **options: object) -> CudaTimer:
    return CudaTimer(cuda, allocate=cuda.allocate, clock=cuda.time, **options)


def test_cpu_samples_are_milliseconds_per_call(fake_time: FakeTime) -> None:
    timer = CpuTimer(fake_time)
    assert timer.block(lambda: fake_time.sleep(0.002), 3) == pytest.approx([2.0] * 3)
    assert timer.back_to_back(lambda: fake_time.sleep(0.002), 2, calls=5) == pytest.approx([2.0] * 2)
    seen: list[str] = []
    timer.block(lambda: seen.append("call"), 2, 2, lambda: seen.append("probe"))
    assert seen == ["call"] * 4 + ["probe"]


def test_cpu_timer_pauses_cycle_collection_and_restores_it(fake_time: FakeTime) -> None:
    states: list[bool] = []
    CpuTimer(fake_time).block(lambda: states.append(gc.isenabled()), 1)
    assert states == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled(), "it was off before, so it stays off"
    finally:
        gc.enable()


def test_back_to_back_counts_launch_gaps(fake_cuda: FakeCuda) -> None:
    """The same kernel, launched every 300 us: throughput is bound by the host."""
    samples = cuda_timer(fake_cuda).back_to_back(fake_cuda.kernel(20e-6, 300e-6), 10, calls=50)
    assert samples == pytest.approx([0.3] * 10, rel=0.01)
    assert fake_cuda.flushes == fake_cuda.sleeps == 0


def test_a_call_that_cannot_be_queued_in_time_is_counted_as_late(fake_cuda: FakeCuda) -> None:
    """20 ms of host work in one call outlast any hold; the sample holds a gap, and says so."""
    timer = cuda_timer(fake_cuda)
    launch = fake_cuda.kernel(20e-6, 10e-3)

    def two_launches() -> None:
        launch()
        launch()

    samples = timer.block(two_launches, 4)
    assert timer.late == 4
    assert min(samples) > 5
    timer.block(fake_cuda.kernel(20e-6), 4)
    assert timer.late == 0, "the count is of the last block"


def test_l2_is_flushed_before_each_sample_and_outside_of_it(fake_cuda: FakeCuda) -> None:
    """A kernel of 20 us cold and 8 us warm: cold with flush, warm without; the 30 us flush never counts."""
    launch = fake_cuda.kernel(20e-6, cached_s=8e-6)
    cold = cuda_timer(fake_cuda)
    assert cold.l2 == "cold"
    assert cold.block(launch, 10) == pytest.approx([0.020] * 10)
    assert fake_cuda.flushes == 10
    warm = cuda_timer(fake_cuda, flush=False)
    assert warm.l2 == "warm"
    assert warm.block(launch, 10) == pytest.approx([0.008] * 10)
    assert fake_cuda.flushes == 10


def test_cuda_probe_runs_while_work_is_in_flight(fake_cuda: FakeCuda) -> None:
    """A clock read on an idle device would not be the clock that the kernel ran at."""
    in_flight: list[bool] = []

    def probe() -> None:
        in_flight.append(fake_cuda.free_at > fake_cuda.time())

    timer = cuda_timer(fake_cuda)
    timer.block(fake_cuda.kernel(1e-3), 10, probe=probe)
    timer.back_to_back(fake_cuda.kernel(1e-3), 2, 5, probe)
    assert in_flight == [True, True]


def test_timer_for_names_the_devices_it_knows(monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda) -> None:
    assert isinstance(timer_for("cpu"), CpuTimer)
    for wrong in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(ValueError, match="use 'cpu', 'cuda' or 'cuda:<index>'"):
            timer_for(wrong)
    chosen: list[int] = []
    for name in ("Event", "synchronize", "_sleep", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake_cuda, name))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("harness.timing.timers._device_buffer", fake_cuda.allocate)
    assert isinstance(timer_for("cuda"), CudaTimer)
    assert isinstance(timer_for("cuda:1"), CudaTimer)
    assert chosen == [0, 1]
    assert fake_cuda.allocated == [100 * 2**20] * 2


# What holds the device until all is queued


def test_the_queue_behind_a_hold_is_bounded(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device queue takes about 1000 launches: at 2.5 us each, fewer wait behind one hold, flush and events included."""
    longest = [0]
    real = FakeCuda.enqueue

    def enqueue(cuda: FakeCuda, device_s: float, event: Any = None) -> None:
        real(cuda, device_s, event)
        longest[0] = max(longest[0], len(cuda.waiting))

    monkeypatch.setattr(FakeCuda, "enqueue", enqueue)
    timer = cuda_timer(fake_cuda, hold=FakeHold(fake_cuda), flush=False)
    assert timer.block(fake_cuda.kernel(2e-6, 2.5e-6), 2000) == pytest.approx([0.002] * 2000)
    assert 0 < longest[0] < 1000


def test_a_host_that_waits_for_the_device_is_not_stuck_and_is_late(fake_cuda: FakeCuda) -> None:
    """The limit ends the hold; such samples say that they may hold gaps."""
    launch = fake_cuda.kernel(20e-6)

    def waits() -> None:
        launch()
        fake_cuda.synchronize()

    timer = cuda_timer(fake_cuda, hold=FakeHold(fake_cuda))
    before = fake_cuda.time()
    timer.block(waits, 4)
    assert timer.late == 4
    assert fake_cuda.time() - before < 1.0


def test_each_hold_waits_for_a_number_of_its_own_and_is_tried_before_it_is_used() -> None:
    launched: list[tuple[int, int]] = []

    def start(flag: torch.Tensor, turn: int, limit_us: int, num_warps: int) -> None:
        launched.append((turn, limit_us))

    flag, waited = torch.zeros(1, dtype=torch.int32), []
    hold = HostReleased({(1,): start}, flag, lambda: waited.append(int(flag)))
    assert (launched, waited) == ([(0, 5000)], [0])
    for turn in (1, 2):
        hold.hold(planned_ms=3.0)
        assert launched[-1] == (turn, 12_000)
        assert int(flag) == turn - 1, "the device waits"
        hold.release()
        assert int(flag) == turn


def test_the_wait_is_machine_code_that_asks_host_memory_anew_and_ends() -> None:
    """Oracle: PTX of sm_90, by Triton and its ptxas: a volatile load and the timer inside of the loop, one exit."""
    script = """
import os, tempfile
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from harness.timing.wait_kernel import wait_for_host
types = {"flag": "*i32", "turn": "i32", "limit_us": "i32"}
source = ASTSource(fn=wait_for_host, signature=types, constexprs={}, attrs={(0,): [["tt.divisibility", 16]]})
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
assert len(built.asm["cubin"]) > 0
print(built.asm["ptx"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loop = re.search(r"(?m)^(\$L__BB0_\d+):.*?bra\s+\1;", done.stdout, re.DOTALL)
    assert loop is not None
    assert "ld.volatile.global" in loop[0]
    assert "%globaltimer" in loop[0]


@pytest.mark.parametrize("host_us", [5, 40, 300])
@pytest.mark.parametrize("released", [False, True])
def test_cuda_samples_are_device_time_without_launch_gaps(
    fake_cuda: FakeCuda, host_us: float, released: bool
) -> None:
    """A 20 us kernel reads as 20 us, though the host takes up to 300 us to launch it; behind a hold that the host releases no
    cycles are counted: whatever the clock, the device waits for as long as queueing takes."""
    hold = FakeHold(fake_cuda)
    timer = cuda_timer(fake_cuda, **({"hold": hold} if released else {}))
    samples = timer.block(fake_cuda.kernel(20e-6, host_us * 1e-6), 200)
    assert samples == pytest.approx([0.020] * 200)
    assert timer.late == 0
    assert (fake_cuda.sleeps == 0) == released
    if released:
        assert timer.hold == "kernel released by the host"
        assert fake_cuda.held_until is None
        assert len(hold.holds) > 1, "chunk by chunk"
        assert max(hold.holds) <= timer.hold_margin * timer.chunk_ms
    else:
        assert timer.block(fake_cuda.kernel(10e-6), 3, calls=7) == pytest.approx([0.010] * 3)


@pytest.mark.parametrize(
    ("l2_mib", "arch", "options", "expected_mib"),
    [
        (50, "", {}, 100),
        (4, "gfx942:sramecc+:xnack-", {}, 512),
        (4, "gfx90a", {}, 8),
        (4, "", {"l2_bytes": 2**20}, 2),
        (0, "", {}, None),
    ],
)
def test_flush_buffer_is_twice_the_last_cache_level(
    l2_mib: int, arch: str, options: dict[str, int], expected_mib: int | None
) -> None:
    """The device's own size; on CDNA 3 the 256 MB Infinity Cache behind L2. None reported: it must be given."""
    cuda = FakeCuda(l2_bytes=l2_mib * 2**20, arch=arch)
    if expected_mib is None:
        with pytest.raises(ValueError, match="l2_bytes="):
            cuda_timer(cuda)
    else:
        cuda_timer(cuda, **options)
        assert cuda.allocated == [expected_mib * 2**20]


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_arm_that_raises_leaves_the_device_released(fake_cuda: FakeCuda, fails_at: int) -> None:
    calls = itertools.count(1)

    def broken() -> None:
        if next(calls) == fails_at:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cuda_timer(fake_cuda, hold=FakeHold(fake_cuda)).block(broken, 5)
    assert fake_cuda.held_until is None


def test_what_cannot_be_built_is_a_sleep(fake_cuda: FakeCuda) -> None:
    """Here there is no GPU whose memory a page could be pinned for."""
    assert isinstance(hold_for(fake_cuda), Sleep)


# A point inside of the closure


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_point_inside_of_a_call_is_timed_in_the_same_samples(fake_cuda: FakeCuda, kind: str) -> None:
    split, clock = Split(), fake_cuda.time
    on_gpu = kind == "cuda"
    first = fake_cuda.kernel(3e-3) if on_gpu else (lambda: clock.sleep(3e-3))
    second = fake_cuda.kernel(1e-3) if on_gpu else (lambda: clock.sleep(1e-3))

    def step() -> None:
        first()
        split()
        second()

    timer = cuda_timer(fake_cuda) if on_gpu else CpuTimer(clock)
    samples = timer.back_to_back(step, 5, split=split)
    assert samples == pytest.approx([4.0] * 5, rel=0.01)
    assert split.samples_ms == pytest.approx([3.0] * 5, rel=0.01)
    step()  # outside of a sample it costs nothing
    timer.back_to_back(second, 2, split=split)
    assert split.samples_ms == [], "a closure that does not come by has no such time"


@pytest.mark.alone
@pytest.mark.gpu
def test_on_a_gpu_a_known_busy_kernel_reads_as_its_length() -> None:
    """Oracle: `torch.cuda._sleep` of twice the cycles takes twice the time, launch gaps not included."""
    timer = timer_for("cuda")
    timer.block(lambda: torch.cuda._sleep(2_000_000), 50)  # brings the clock up
    one = sorted(timer.block(lambda: torch.cuda._sleep(1_000_000), 20))[10]
    two = sorted(timer.block(lambda: torch.cuda._sleep(2_000_000), 20))[10]
    assert two / one == pytest.approx(2.0, rel=0.05)
    assert timer.late == 0


def adjoining_samples_read_as_their_lengths(
    timer: CudaTimer, busy: Callable[[int], object], rel: float
) -> None:
    """Kernels of twice the cycles take twice the time; what lies between two samples is in one of them; a point inside is too."""
    timer.back_to_back(lambda: busy(2_000_000), 50)  # brings the clock up
    one, two, both = (
        statistics.median(timer.back_to_back(step, 20))
        for step in (
            lambda: busy(1_000_000),
            lambda: busy(2_000_000),
            lambda: (busy(1_000_000), busy(2_000_000)),
        )
    )
    assert two / one == pytest.approx(2.0, rel=rel)
    assert both / one == pytest.approx(3.0, rel=rel)
    split = Split()
    samples = timer.back_to_back(lambda: (busy(1_000_000), split(), busy(2_000_000)), 20, split=split)
    shares = [first / whole for first, whole in zip(split.samples_ms, samples, strict=True)]
    assert statistics.median(shares) == pytest.approx(1 / 3, rel=rel)


@pytest.mark.alone
@pytest.mark.gpu
def test_on_a_gpu_adjoining_samples_read_as_their_lengths() -> None:
    """Oracle: `torch.cuda._sleep`, whose cycles are given."""
    adjoining_samples_read_as_their_lengths(timer_for("cuda"), torch.cuda._sleep, 0.05)


def test_adjoining_samples_of_a_simulated_device_read_as_their_lengths(fake_cuda: FakeCuda) -> None:
    """Oracle: the simulated device; the same body fails where the lengths are not those that are claimed."""

    def busy(cycles: int) -> None:
        fake_cuda.kernel(cycles * 1e-9)()

    adjoining_samples_read_as_their_lengths(cuda_timer(fake_cuda), busy, 0.05)
    with pytest.raises(AssertionError):
        adjoining_samples_read_as_their_lengths(cuda_timer(fake_cuda), lambda cycles: busy(1_000_000), 0.05)


def test_ranks_begin_a_block_together_by_the_clock_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda: seen.append("barrier"))
    timer = RanksTimer("cpu")
    assert len(timer.block(lambda: seen.append("step"), 2)) == 2
    assert seen == ["barrier", "step", "step"]

    class Events(HostClock):
        def settle(self) -> None:
            seen.append("settled")

    monkeypatch.setattr(timers, "EventClock", Events)
    on_gpu = RanksTimer("cuda")
    for each in (timer, on_gpu):
        each.synchronize()
    assert seen[3:] == ["settled"], "events of the GPU, and no host clock, time its steps"
    assert (on_gpu.method, on_gpu.l2) == ("cuda_events_ranks", "warm")
    assert (timer.method, timer.l2) == ("perf_counter_ranks", "none")
