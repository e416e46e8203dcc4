"""Timers: how n samples of one closure are taken. Policy (how many, when to stop) lives in `timing.py`.

Two ways of sampling, on both devices:

* `block`: each sample stands alone. On CUDA an event pair surrounds each one, the L2 cache is flushed
  outside of the pair, and the work is queued ahead behind a kernel that waits for the host (`harness.timing.timers`),
  so that a sample is device time and holds no launch gaps. Samples that could not be queued in time are counted in
  `late`. Where calls are too short for the events' resolution the same is done without a flush, with several calls in
  a sample and their operands rotating (`rotating`, `harness.timing.rounds`).
* `back_to_back`: one sample begins where the last one ended. Nothing is flushed and nothing is held, so
  a sample is throughput: launch gaps count, as they do in training.

Times are milliseconds per call. CUDA event resolution (about 0.5 us) and the need to queue ahead are
described in the CUDA runtime documentation (cudaEventElapsedTime) and in NVIDIA's nvbench.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from harness.timing.clock import EventClock, HostClock, Split, adjoining, gc_paused

LIMIT_MS = 5.0  # least time limit; a pause of the host's interpreter is shorter
LIMIT_TIMES = 4  # of the planned time, where that is longer


class Hold(Protocol):
    """Keeps the device from what is queued behind it.

    Attributes:
        name: what it is, for the row.
    """

    name: str

    def hold(self, planned_ms: float) -> None:
        """What is queued on the current stream from now on waits; `planned_ms`: for how long, as far as is known."""
        ...

    def release(self) -> None:
        """All is queued."""
        ...


class Sleep:
    """`torch.cuda._sleep`, which counts cycles of a multiprocessor.

    Args:
        cuda: the module that has it.
        why: why it takes the place of `HostReleased`; "" where nobody asked for that one.
    """

    # 2 GHz is the boost clock of current parts; a slower clock holds for longer.
    cycles_per_ms = 2_000_000

    def __init__(self, cuda: Any, why: str = "") -> None:
        self._cuda = cuda
        self.name = "sleep of an assumed clock" + (f" ({why})" if why else "")

    def hold(self, planned_ms: float) -> None:
        self._cuda._sleep(int(planned_ms * self.cycles_per_ms))

    def release(self) -> None:
        """Do nothing: a sleep ends by itself."""


class HostReleased:
    """A Triton kernel of one program that waits for a number in pinned host memory.

    Each hold waits for a number of its own, one higher than the last: nothing is reset, so the host may queue the next
    hold while the device is still at work behind the one before.

    Args:
        kernel: `harness.timing.wait_kernel.wait_for_host`, subscripted by its grid; replaced in tests.
        flag: int32 [1] in host memory that the device reads.
        synchronize: waits for the device.

    Raises:
        Exception: building or launching the kernel failed; it is tried here, before a sample depends on it.
    """

    name = "kernel released by the host"

    def __init__(self, kernel: Any, flag: Any, synchronize: Any) -> None:
        self._kernel, self._flag = kernel, flag
        self._number = flag.numpy()
        self._turn = int(self._number[0])
        self._launch(LIMIT_MS)  # released already
        synchronize()

    def hold(self, planned_ms: float) -> None:
        self._turn += 1
        self._launch(max(LIMIT_MS, LIMIT_TIMES * planned_ms))

    def release(self) -> None:
        self._number[0] = self._turn

    def _launch(self, limit_ms: float) -> None:
        self._kernel[(1,)](self._flag, self._turn, int(1e3 * limit_ms), num_warps=1)


def hold_for(cuda: Any) -> Hold:
    """`HostReleased` on the current device; `Sleep` with the reason where that cannot be had."""
    try:
        import torch

        if torch.version.hip is not None:
            return Sleep(cuda, "ROCm has no %globaltimer")
        from harness.timing.wait_kernel import wait_for_host

        flag = torch.zeros(1, dtype=torch.int32).pin_memory()
        return HostReleased(wait_for_host, flag, cuda.synchronize)
    except Exception as error:  # noqa: BLE001 - no Triton, no compiler, no pinned memory: any of them leaves the sleep
        return Sleep(cuda, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}")


L2State = Literal["cold", "warm", "rotating", "none"]
Seconds = Callable[[], float]  # seconds, monotonic


class Timer(Protocol):
    """Takes samples of a closure on one device.

    Attributes:
        method: how time is read; ratios of two methods mean nothing.
        l2: state in which `block` leaves the last-level cache before each sample; "none": not controlled.
        resolution_ms: smallest duration that can be distinguished from zero.
        late: samples of the last `block` that may hold launch gaps.
        hold: what keeps the device from work that is not queued yet; "" where nothing does.
        disturbed: the process was "stopped" in the last block, or "contended": it waited for a core; "" where it is not known.
    """

    method: str
    l2: L2State
    resolution_ms: float
    late: int
    hold: str
    disturbed: str

    @property
    def block(self) -> Callable[..., list[float]]:
        """Samples that stand alone, n of them, each the mean of `calls` calls; see `CpuTimer`."""
        ...

    @property
    def back_to_back(self) -> Callable[..., list[float]]:
        """Take samples as `block` does, adjoining, without flush or hold; of one call also up to the split."""
        ...

    def rotating(self) -> Timer | None:
        """The same timer without a flush, for closures that rotate their operands; None where nothing is flushed."""
        ...

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        ...

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """A named range for profilers."""
        ...


class CpuTimer:
    """`time.perf_counter` around calls that run on the host. Caches are as the previous call left them."""

    method = "perf_counter"
    l2: L2State = "none"
    # What two clock reads cost (50 to 100 ns), which is far above the clock's own granularity of 1 ns.
    resolution_ms = 1e-4
    late = 0
    hold = disturbed = ""

    def __init__(
        self, clock: Seconds = time.perf_counter, steps: HostClock | EventClock | None = None
    ) -> None:
        self._clock, self._steps = clock, steps or HostClock(clock)

    def block(
        self, fn: Callable[[], object], n: int, calls: int = 1, probe: Callable[[], None] | None = None
    ) -> list[float]:
        """n samples of `calls` calls each, in ms per call."""
        clock, repeat, spans = self._clock, range(calls), []
        with gc_paused():
            for _ in range(n):
                start = clock()
                for _ in repeat:
                    fn()
                spans.append(clock() - start)
        if probe is not None:
            probe()
        return [1e3 * span / calls for span in spans]

    def back_to_back(
        self,
        fn: Callable[[], object],
        n: int,
        calls: int = 1,
        probe: Callable[[], None] | None = None,
        split: Split | None = None,
    ) -> list[float]:
        """n adjoining samples of `calls` calls each, in ms per call, with one mark between two samples."""
        return adjoining(self._steps, fn, n, calls, probe, split)

    def rotating(self) -> CpuTimer | None:
        """Caches of the host are not controlled."""
        return None

    def synchronize(self) -> None:
        """Nothing is in flight on return of a host call."""

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """No profiler ranges on the host."""
        return nullcontext(name)


class RanksTimer(CpuTimer):
    """Whole steps that all ranks of an arm take together, each by the clock of its device; nothing is flushed.

    Args:
        device: "cpu" or "cuda".
    """

    method = "perf_counter_ranks"

    def __init__(self, device: str) -> None:
        if device == "cuda":
            super().__init__(steps=EventClock())
            self.method, self.l2, self.resolution_ms = "cuda_events_ranks", "warm", 5e-4
        else:
            super().__init__()

    def back_to_back(
        self,
        fn: Callable[[], object],
        n: int,
        calls: int = 1,
        probe: Callable[[], None] | None = None,
        split: Split | None = None,
    ) -> list[float]:
        """n adjoining samples, begun by all ranks at once."""
        import torch.distributed as dist

        dist.barrier()
        return super().back_to_back(fn, n, calls, probe, split)

    block = back_to_back

    def synchronize(self) -> None:
        """Waits until this rank's device is idle."""
        self._steps.settle()


class CudaTimer(CpuTimer):
    """CUDA (or HIP) events on the current stream of the current device.

    Args:
        cuda: the module that offers `Event`, `synchronize`, `_sleep`, `nvtx`; `torch.cuda` by default.
        l2_bytes: size of the last cache level before memory; read from the device by default.
        flush: overwrite twice that size before each sample of `block`, so that it starts cold.
        allocate: bytes -> a buffer with `zero_()`; device memory by default.
        clock: host clock in seconds, by which the queue is planned; samples never come from it.
        hold: keeps the device from a chunk of samples until all of it is queued; a sleep by default.
    """

    method = "cuda_events"
    resolution_ms = 5e-4

    # A device queue takes about 1000 launches before the host blocks, which it must not do while the device waits for
    # it. At no less than 2.5 us each, 2 ms of host work are 800 at most; a chunk before it is released and drains.
    chunk_ms = 2.0
    # Host time of a flush and two event records.
    sample_overhead_ms = 0.03
    # A sleep outlasts the planned host time, which varies.
    hold_margin = 1.5

    def __init__(
        self,
        cuda: Any = None,
        l2_bytes: int | None = None,
        flush: bool = True,
        allocate: Callable[[int], Any] | None = None,
        clock: Seconds = time.perf_counter,
        hold: Hold | None = None,
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        super().__init__(clock, EventClock(cuda))
        self._cuda = cuda
        self._hold = hold if hold is not None else Sleep(cuda)
        self.hold = self._hold.name
        self.late = 0
        self.l2: L2State = "cold" if flush else "warm"
        self._scratch = None
        if flush:
            if l2_bytes is None:
                l2_bytes = last_level_cache_bytes(cuda.get_device_properties(cuda.current_device()))
            # Twice the size: replacement is not strictly least-recently-used.
            self._scratch = (allocate or _device_buffer)(2 * l2_bytes)

    def block(
        self, fn: Callable[[], object], n: int, calls: int = 1, probe: Callable[[], None] | None = None
    ) -> list[float]:
        """n samples of `calls` calls each, in ms per call; see the module for flush and queueing.

        The device waits for one chunk of samples at a time, of `chunk_ms` of host work: the queue is bounded. One untimed call leads in. It restores the state that another arm disturbed (instruction cache,
        allocator) and shows what one call costs the host, from which the hold is planned.
        """
        starts, ends = self._events(n), self._events(n)
        self.late = 0
        with gc_paused():
            begin = self._clock()
            fn()
            sample_ms = 1e3 * (self._clock() - begin) * calls + self.sample_overhead_ms
            chunk = max(1, min(n, int(self.chunk_ms / sample_ms)))
            hold_ms = min(self.hold_margin * chunk * sample_ms, self.hold_margin * self.chunk_ms)
            try:
                for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
                    if i % chunk == 0:
                        self._hold.release()
                        self._hold.hold(hold_ms)
                    if self._scratch is not None:
                        self._scratch.zero_()
                    start.record()
                    for _ in range(calls):
                        fn()
                    end.record()
                    # The device got there before the call was wholly queued: the sample may hold a gap.
                    self.late += bool(start.query())
            finally:
                self._hold.release()
            if probe is not None:
                probe()
            self.synchronize()
        return [start.elapsed_time(end) / calls for start, end in zip(starts, ends, strict=True)]

    def rotating(self) -> CudaTimer | None:
        """See `Timer`."""
        if self._scratch is None:
            return None
        other = copy.copy(self)
        other._scratch, other.l2 = None, "rotating"
        return other

    def synchronize(self) -> None:
        """Waits for all queued work; a failed kernel raises here."""
        self._cuda.synchronize()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range."""
        return self._cuda.nvtx.range(name)

    def _events(self, n: int) -> list[Any]:
        return [self._cuda.Event(enable_timing=True) for _ in range(n)]


def timer_for(device: str) -> Timer:
    """The timer of a torch device string; a CUDA device becomes the current one.

    Raises:
        ValueError: device is neither "cpu" nor "cuda" nor "cuda:<index>".
    """
    kind, _, index = device.partition(":")
    if device == "cpu":
        return CpuTimer()
    if kind == "cuda" and (index.isdecimal() or device == "cuda"):
        import torch

        torch.cuda.set_device(int(index or torch.cuda.current_device()))
        return CudaTimer(hold=hold_for(torch.cuda))
    raise ValueError(f"no timer for device {device!r}; use 'cpu', 'cuda' or 'cuda:<index>'")


# Memory-side caches that the runtime's L2 figure leaves out: AMD Infinity Cache of CDNA 3 and 4, 256 MB
# (AMD CDNA 3 white paper, 2023; AMD Instinct MI355X data sheet, 2025).
_MEMORY_SIDE_CACHE_BYTES = {"gfx942": 256 * 2**20, "gfx950": 256 * 2**20}


def last_level_cache_bytes(properties: Any) -> int:
    """Size of the largest on-chip cache, from `torch.cuda.get_device_properties`.

    Raises:
        ValueError: the device does not report one; the caller then has to name it.
    """
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    size = max(int(getattr(properties, "L2_cache_size", 0)), _MEMORY_SIDE_CACHE_BYTES.get(architecture, 0))
    if size <= 0:
        raise ValueError(f"{properties.name} reports no L2 size; pass CudaTimer(l2_bytes=...)")
    return size


def _device_buffer(size: int) -> Any:
    import torch

    return torch.empty(size // 4, dtype=torch.int32, device="cuda")


def release_memory() -> None:
    """Frees what earlier work left in reference cycles and in the allocator's cache of the current GPU."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
