"""Timers. Oracle: a simulated device (`fakes.FakeCuda`); the test sets kernel lengths and host costs."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from fakes import FakeCuda, FakeHold

from harness.timing.clock import Split
from harness.timing.timers import CpuTimer, CudaTimer, HostReleased, Sleep, hold_for, timer_for


def cuda_timer(cuda: FakeCuda, **options: object) -> CudaTimer:
    return CudaTimer(cuda, allocate=cuda.allocate, clock=cuda.time, **options)


def test_back_to_back_counts_launch_gaps(fake_cuda: FakeCuda) -> None:
    """The same kernel, launched every 300 us: throughput is bound by the host."""
    samples = cuda_timer(fake_cuda).back_to_back(fake_cuda.kernel(20e-6, 300e-6), 10, calls=50)
    assert samples == pytest.approx([0.3] * 10, rel=0.01)
    assert fake_cuda.flushes == fake_cuda.sleeps == 0


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


def test_what_cannot_be_built_is_a_sleep(fake_cuda: FakeCuda) -> None:
    """Here there is no GPU whose memory a page could be pinned for."""
    assert isinstance(hold_for(fake_cuda), Sleep)


# A point inside of the closure


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
