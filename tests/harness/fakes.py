# ruff: noqa: N802 -- torch's and pynvml's own names
"""Fakes on which the CUDA path runs without a GPU: host time, a device with one stream, and NVML.

`FakeCuda` keeps the rules that timing depends on. Work is queued in order; a kernel starts when the one
before it has ended and the host has launched it; events are stamped in that order; `synchronize` moves the
host to the end of the queue. Launch gaps, cache state and late queueing therefore show as they would.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class FakeTime:
    """A clock in seconds that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.stamp: float | None = None
        self.recorded = False

    def record(self) -> None:
        self._cuda.time.sleep(self._cuda.record_s)
        self._cuda.enqueue(0.0, self)
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded, "query of an event that was not recorded"
        self._cuda.expire()
        return self.stamp is not None and self.stamp <= self._cuda.time()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.stamp is not None
        assert end.stamp is not None
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready: both events must be complete before elapsed_time")
        return 1e3 * (end.stamp - self.stamp)


class FakeCuda:
    """What `torch.cuda` offers to CudaTimer and fingerprint, on a FakeTime."""

    def __init__(self, time: FakeTime | None = None, l2_bytes: int = 50 * 2**20, arch: str = "") -> None:
        self.time = time or FakeTime()
        self.free_at = 0.0  # when the device has done all that is queued
        self.cached = False  # whether the last kernel's operands are still in L2
        self.allocated: list[int] = []
        self.flushes = self.sleeps = self.syncs = 0
        self.record_s = 1e-6
        self.ranges: list[str] = []
        self.waiting: list[tuple[float, FakeEvent | None]] = []  # queued behind a hold
        self.held_until: float | None = None  # limit of the hold under way
        self.pending: Exception | None = None  # of a kernel that failed; raised by the next synchronize
        self.properties = SimpleNamespace(
            name="NVIDIA H200",
            uuid="1b2c3d4e-0000-1111-2222-333344445555",
            total_memory=150_754_820_096,
            multi_processor_count=132,
            L2_cache_size=l2_bytes,
            major=9,
            minor=0,
            gcnArchName=arch,
        )
        self.nvtx = SimpleNamespace(range=self._range)

    def enqueue(self, device_s: float, event: FakeEvent | None = None) -> None:
        """Queues work of a length, which an event stamps at its end; behind a hold it begins when that is over."""
        self.expire()
        if self.held_until is not None:
            self.waiting.append((device_s, event))
            return
        self.free_at = max(self.free_at, self.time()) + device_s
        if event is not None:
            event.stamp = self.free_at

    def hold(self, limit_s: float) -> None:
        """A kernel that waits for the host, for so long at most."""
        assert self.held_until is None, "a hold was queued before the last one was released"
        self.held_until = max(self.free_at, self.time()) + limit_s

    def expire(self) -> None:
        """Ends a hold whose limit has passed."""
        if self.held_until is not None and self.time() >= self.held_until:
            self.unhold(self.held_until)

    def unhold(self, when: float) -> None:
        """Ends the hold: what is queued behind it begins."""
        if self.held_until is None:
            return
        self.held_until, waiting, self.waiting = None, self.waiting, []
        self.free_at = max(self.free_at, when)
        for device_s, event in waiting:
            self.free_at += device_s
            if event is not None:
                event.stamp = self.free_at

    def kernel(
        self, device_s: float, host_s: float = 5e-6, cached_s: float | None = None
    ) -> Callable[[], None]:
        """A closure that launches one kernel; `cached_s`: its length when its operands are in L2."""

        def launch() -> None:
            self.time.sleep(host_s)
            self.enqueue(cached_s if self.cached and cached_s is not None else device_s)
            self.cached = True

        return launch

    def allocate(self, size: int) -> FakeCuda:
        """A buffer whose `zero_` flushes the cache."""
        self.allocated.append(size)
        return self

    def zero_(self) -> None:
        self.time.sleep(5e-6)
        self.enqueue(30e-6)
        self.cached = False
        self.flushes += 1

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def _sleep(self, cycles: int) -> None:
        self.time.sleep(5e-6)
        self.enqueue(cycles / 1.98e9)
        self.sleeps += 1

    def synchronize(self) -> None:
        if self.held_until is not None:  # a host that waits for the device releases nothing
            self.time.now = max(self.time.now, self.held_until)
            self.expire()
        self.time.now = max(self.time.now, self.free_at)
        self.syncs += 1
        if self.pending is not None:
            error, self.pending = self.pending, None
            raise error

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, device: int) -> SimpleNamespace:
        assert device in (0, "cuda:0")
        return self.properties

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self.ranges.append(name)
        yield


class FakeHold:
    """`harness.timing.timers.HostReleased` on a FakeCuda."""

    name = "kernel released by the host"

    def __init__(self, cuda: FakeCuda, limit_s: float = 5e-3) -> None:
        self.cuda, self.limit_s = cuda, limit_s
        self.holds: list[float] = []  # planned, in ms

    def hold(self, planned_ms: float) -> None:
        self.holds.append(planned_ms)
        self.cuda.time.sleep(5e-6)
        self.cuda.hold(max(self.limit_s, 4e-3 * planned_ms))

    def release(self) -> None:
        self.cuda.expire()
        self.cuda.unhold(self.cuda.time())


class FakeNvml:
    """The part of pynvml that GpuMonitor uses, for one H200, or for one MIG slice of it.

    Args:
        refused: names of functions that answer "Not Supported".
        absent: names of functions that this version of the module lacks.
        mig: the known UUID is that of a slice.
    """

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    UUID = "1b2c3d4e-0000-1111-2222-333344445555"

    def __init__(
        self, refused: tuple[str, ...] = (), absent: tuple[str, ...] = (), mig: bool = False
    ) -> None:
        self.refused, self.absent, self.mig = set(refused), set(absent), mig
        self.sm_clocks: Iterator[int] | None = None  # successive readings; 1980 forever by default
        self.events = 0
        self.pids: list[int] = []
        self.opened = 0
        self.energy_mj = 5_000_000

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in self.absent:
                raise AttributeError(name)
            if name in self.refused:
                return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *_: object) -> Any:
        raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index != 0:
            raise self.NVMLError("Invalid Argument")
        return "board"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != ("MIG-" if self.mig else "GPU-") + self.UUID:
            raise self.NVMLError("Not Found")
        return "slice" if self.mig else "board"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        if handle != "slice":
            raise self.NVMLError("Invalid Argument")
        return "board"

    def nvmlDeviceGetClockInfo(self, handle: str, domain: int) -> int:
        self._board_only(handle)
        if domain == self.NVML_CLOCK_MEM:
            return 3201
        return 1980 if self.sm_clocks is None else next(self.sm_clocks)

    def nvmlDeviceGetMaxClockInfo(self, handle: str, domain: int) -> int:
        self._board_only(handle)
        return 1980 if domain == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._board_only(handle)
        return 612_345

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._board_only(handle)
        return self.energy_mj

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        self._board_only(handle)
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._board_only(handle)
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        total = 18 if handle == "slice" else 140
        return SimpleNamespace(used=2 * 2**30, total=total * 2**30)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._board_only(handle)
        return self.events

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self._board_only(handle)
        return self.events

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        self._board_only(handle)
        return [1, 1]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        self._board_only(handle)
        return [int(self.mig), int(self.mig)]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.03"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def _board_only(self, handle: str) -> None:
        if handle != "board":
            raise self.NVMLError("Not Supported")


class FakeGraphs:
    """What a CUDA graph takes of torch.cuda, one of each: a log of calls, each with the stream that was current."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = 0  # made so far
        self.current = "default"
        self.refuses = False  # captures, as of a step that waits
        self.functions: dict[str, Callable[..., Any]] = {
            "Stream": self.make_stream,
            "current_device": lambda: 0,
            "CUDAGraph": lambda: self,
            "current_stream": lambda: FakeStream(self, self.current),
            "stream": self.stream,
            "graph": self.graph,
            "synchronize": lambda: self.note("synchronize"),
        }

    def make_stream(self, device: int) -> FakeStream:
        self.streams += 1
        return FakeStream(self, "side")

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self.current}")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraphs, stream: FakeStream) -> Iterator[None]:
        """Behave like torch: where the end of a capture fails, the stream is not restored."""
        assert graph is self
        before, self.current = self.current, stream.name
        self.note("begin")
        try:
            yield
        finally:
            self.note("end")
            if self.refuses:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before

    def replay(self) -> None:
        self.note("replay")

    def reset(self) -> None:
        self.note("reset")


class FakeStream:
    def __init__(self, cuda: FakeGraphs, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.note(f"{self.name} waits for {other.name}")
