"""What NVML says about one GPU while it is measured: clocks, power, heat, throttling, neighbours.

A reading that fails is None and never a number: not on ROCm, in a container without the library, on a
MIG slice (which has no clock of its own: board readings come from its parent), without permission.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, NVML 13).
CLOCK_EVENT_REASONS: dict[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock",
    0x200: "board_limit",
    0x400: "reliability",
}
# Those by which power, heat or the board hold the clock below what was asked for. Idling, a clock that was
# set, and the voltage limit at the top of the boost range ("reliability") are not among them.
THROTTLING = frozenset(
    {
        "sw_power_cap",
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "board_limit",
    }
)


class Monitor:
    """What the timing engine asks while it measures; of a device without a monitor nothing is known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sm_clock_mhz(self) -> float | None:
        """SM clock now."""
        return None

    def throttle_reasons(self) -> frozenset[str] | None:
        """Names of the clock event reasons that hold now; empty: none; None: can't be read."""
        return None

    def energy_j(self) -> float | None:
        """Joules that the device has used since some fixed time; None: can't be read."""
        return None

    def contended(self) -> bool | None:
        """Whether another process computes on this device; None: can't be known."""
        return None

    def share_with(self, pids: Collection[int]) -> None:
        """Take these processes for our own from now on, and no others of an earlier call."""

    def state(self) -> dict[str, object]:
        """All volatile readings, for the environment."""
        return {}


class GpuMonitor(Monitor):
    """NVML readings of one GPU; a context manager, since NVML is a library that is opened and closed.

    Args:
        uuid: of the device, with or without the prefix "GPU-" or "MIG-" (torch gives it without). This is
            the safe choice: NVML's indices ignore CUDA_VISIBLE_DEVICES.
        index: NVML index, where the UUID is not known.
        nvml: the module to ask; `pynvml` by default.
        pid_exists: tells whether a process id is one of this machine's (or container's) own.
        ours: process ids that are no strangers: by default this process, and the one that a worker works for.

    Attributes:
        problem: why nothing can be read; "" while all is well.

    Raises:
        ValueError: neither uuid nor index, or both.
    """

    def __init__(
        self,
        uuid: str | None = None,
        index: int | None = None,
        nvml: Any = None,
        pid_exists: Callable[[int], bool] = psutil.pid_exists,
        ours: Collection[int] | None = None,
    ) -> None:
        if (uuid is None) == (index is None):
            raise ValueError(f"GpuMonitor(uuid={uuid!r}, index={index!r}): give one of the two")
        self._uuid, self._index, self._nvml, self._pid_exists = uuid, index, nvml, pid_exists
        parent = multiprocessing.parent_process()
        self._ours = {os.getpid(), *([parent.pid] if parent else [])} if ours is None else set(ours)
        self._sharing: set[int] = set()  # see `share_with`
        self._device: Any = None  # what was asked for: a GPU, or a MIG slice of one
        self._board: Any = None  # the whole GPU
        self._open = False
        self.problem = "not opened; use `with`"

    def __enter__(self) -> Self:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError as error:
                self.problem = f"pynvml: {error}"
                return self
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            self._open = True
            self._device = self._find()
        except self._errors as error:
            self.problem = f"NVML: {error}"
            return self
        self.problem = ""
        self._board = self._device
        parent = self._read("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        self._board = self._device if parent is None else parent
        return self

    def __exit__(self, *_: object) -> None:
        self._device = self._board = None
        self.problem = "closed"
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    @property
    def is_mig_slice(self) -> bool:
        """Whether the device is a MIG slice; its clock, power and heat are the whole board's."""
        return self._board is not self._device

    def sm_clock_mhz(self) -> float | None:
        """SM clock now."""
        return self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")

    def memory_clock_mhz(self) -> float | None:
        """Memory clock now."""
        return self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM")

    def max_sm_clock_mhz(self) -> float | None:
        """Highest SM clock that the device can be set to."""
        return self._clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM")

    def power_w(self) -> float | None:
        """Power draw; since Ampere (but for GA100) the mean over one second, so slower than a block."""
        return _scaled(self._read("nvmlDeviceGetPowerUsage"), 1e-3)

    def energy_j(self) -> float | None:
        """Energy of the whole board since the driver was loaded (Volta and later); it moves some ten times a second.

        None on a MIG slice: the board's other slices are in it.
        """
        if self.is_mig_slice:
            return None
        return _scaled(self._read("nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def power_limit_w(self) -> float | None:
        """Power limit that is in force."""
        return _scaled(self._read("nvmlDeviceGetEnforcedPowerLimit"), 1e-3)

    def temperature_c(self) -> float | None:
        """Temperature of the GPU die."""
        return _scaled(self._read("nvmlDeviceGetTemperature", self._constant("NVML_TEMPERATURE_GPU")), 1.0)

    def memory_gib(self) -> tuple[float, float] | None:
        """Memory (used by all processes, in all) of the device, or of the slice on MIG."""
        info = self._read("nvmlDeviceGetMemoryInfo", of_slice=True)
        return None if info is None else (info.used / 2**30, info.total / 2**30)

    def throttle_reasons(self) -> frozenset[str] | None:
        """Names of the clock event reasons that hold now; a bit without a name is given as a number."""
        # NVML 12.2 renamed the function; the older name is what drivers before 535 know.
        bits = self._read("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else decode_clock_events(int(bits))

    def ecc(self) -> bool | None:
        """Whether ECC is on; None also where the device has none."""
        modes = self._read("nvmlDeviceGetEccMode")
        return None if modes is None else bool(modes[0])

    def mig(self) -> bool | None:
        """Whether the board is split by MIG; None also where it can't be."""
        modes = self._read("nvmlDeviceGetMigMode")
        return None if modes is None else bool(modes[0])

    def driver(self) -> str | None:
        """Driver version."""
        return self._read("nvmlSystemGetDriverVersion", of_system=True)

    def contended(self) -> bool | None:
        """Whether a process other than our own computes on the device.

        NVML gives process ids of the host. Inside a container they mean nothing: as many foreign ids as we have
        processes there may be these (None), more can't be.
        """
        processes = self._read("nvmlDeviceGetComputeRunningProcesses", of_slice=True)
        if processes is None:
            return None
        others = {int(process.pid) for process in processes} - self._ours - self._sharing
        unknown = 0 < len(others) == len(processes) <= 1 + len(self._sharing)
        if unknown and not any(map(self._pid_exists, others)):
            return None
        return bool(others)

    def share_with(self, pids: Collection[int]) -> None:
        """Take these processes for our own from now on, and no others of an earlier call: remote arms of a case."""
        self._sharing = set(pids)

    def state(self) -> dict[str, object]:
        """Volatile readings: clocks, power, temperature, throttle reasons, memory in use, contention."""
        reasons, memory = self.throttle_reasons(), self.memory_gib()
        return {
            "sm_clock_mhz": self.sm_clock_mhz(),
            "memory_clock_mhz": self.memory_clock_mhz(),
            "power_w": self.power_w(),
            "power_limit_w": self.power_limit_w(),
            "temperature_c": self.temperature_c(),
            "throttle_reasons": None if reasons is None else sorted(reasons),
            "memory_used_gib": None if memory is None else memory[0],
            "contended": self.contended(),
        }

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        # A driver older than the module raises the second one.
        return (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError)

    def _find(self) -> Any:
        if self._index is not None:
            return self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        bare = str(self._uuid).removeprefix("GPU-").removeprefix("MIG-")
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
        except self._errors:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")

    def _constant(self, name: str) -> int | None:
        return getattr(self._nvml, name, None)

    def _clock(self, function: str, domain: str) -> float | None:
        return _scaled(self._read(function, self._constant(domain)), 1.0)

    def _read(self, name: str, *args: object, of_slice: bool = False, of_system: bool = False) -> Any:
        """Result of one NVML call, or None where it can't be had."""
        handle = self._device if of_slice else self._board
        function = getattr(self._nvml, name, None)
        if handle is None or function is None:
            return None
        try:
            return function(*args) if of_system else function(handle, *args)
        except self._errors:
            return None


def monitor_for(device: str) -> Monitor:
    """The monitor of a torch device string, to be used as `with monitor_for(device) as monitor:`."""
    if not device.startswith("cuda"):
        return Monitor()
    import torch

    return GpuMonitor(uuid=str(torch.cuda.get_device_properties(device).uuid))


def decode_clock_events(bits: int) -> frozenset[str]:
    """Names of the set bits.

    >>> sorted(decode_clock_events(0x4 | 0x40 | 0x8000))
    ['bit_0x8000', 'hw_thermal_slowdown', 'sw_power_cap']
    """
    return frozenset(
        CLOCK_EVENT_REASONS.get(1 << i, f"bit_{1 << i:#x}") for i in range(bits.bit_length()) if bits >> i & 1
    )


def _scaled(reading: Any, factor: float) -> float | None:
    return None if reading is None else float(reading) * factor
