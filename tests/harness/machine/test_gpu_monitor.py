"""GPU monitor. Oracle: `fakes.FakeNvml`, whose readings are known; bit names as in nvml.h through pynvml."""

from __future__ import annotations

import contextlib
import os
import sys

import pynvml
import pytest
from fakes import FakeNvml

from harness.machine.gpu_monitor import CLOCK_EVENT_REASONS, THROTTLING, GpuMonitor, Monitor, monitor_for

READINGS = {
    "sm_clock_mhz": 1980.0,
    "memory_clock_mhz": 3201.0,
    "max_sm_clock_mhz": 1980.0,
    "power_w": 612.345,
    "power_limit_w": 700.0,
    "energy_j": 5000.0,
    "temperature_c": 61.0,
    "ecc": True,
    "mig": False,
    "driver": "580.159.03",
}


def test_readings_come_in_the_units_of_their_names(fake_nvml: FakeNvml) -> None:
    with GpuMonitor(uuid=fake_nvml.UUID, nvml=fake_nvml) as monitor:
        assert {name: getattr(monitor, name)() for name in READINGS} == pytest.approx(READINGS)
        assert monitor.memory_gib() == (2.0, 140.0)
        assert not monitor.is_mig_slice
        assert monitor.problem == ""


@pytest.mark.parametrize("which", [{"uuid": FakeNvml.UUID}, {"uuid": f"GPU-{FakeNvml.UUID}"}, {"index": 0}])
def test_a_device_is_found_by_either_name(which: dict[str, object], fake_nvml: FakeNvml) -> None:
    with GpuMonitor(nvml=fake_nvml, **which) as monitor:
        assert monitor.sm_clock_mhz() == 1980.0


@pytest.mark.parametrize("which", [{}, {"uuid": "x", "index": 0}])
def test_one_way_to_name_the_device_is_needed(which: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        GpuMonitor(**which)


def test_a_mig_slice_reads_board_figures_from_its_parent() -> None:
    """NVML refuses clocks, power and heat of a slice; memory and processes are the slice's own."""
    nvml = FakeNvml(mig=True)
    with GpuMonitor(uuid=nvml.UUID, nvml=nvml) as monitor:
        assert monitor.is_mig_slice
        assert monitor.sm_clock_mhz() == 1980.0
        assert monitor.memory_gib() == (2.0, 18.0)
        assert monitor.mig() is True
        assert monitor.energy_j() is None, "the board's other slices are in its energy"


FUNCTIONS = {
    "sm_clock_mhz": "nvmlDeviceGetClockInfo",
    "memory_clock_mhz": "nvmlDeviceGetClockInfo",
    "max_sm_clock_mhz": "nvmlDeviceGetMaxClockInfo",
    "power_w": "nvmlDeviceGetPowerUsage",
    "power_limit_w": "nvmlDeviceGetEnforcedPowerLimit",
    "temperature_c": "nvmlDeviceGetTemperature",
    "energy_j": "nvmlDeviceGetTotalEnergyConsumption",
    "ecc": "nvmlDeviceGetEccMode",
    "mig": "nvmlDeviceGetMigMode",
    "driver": "nvmlSystemGetDriverVersion",
    "memory_gib": "nvmlDeviceGetMemoryInfo",
    "contended": "nvmlDeviceGetComputeRunningProcesses",
}


@pytest.mark.parametrize(("reading", "function"), FUNCTIONS.items())
def test_a_refused_or_missing_reading_is_none_and_the_others_stay(reading: str, function: str) -> None:
    for nvml in (FakeNvml(refused=(function,)), FakeNvml(absent=(function,))):
        with GpuMonitor(uuid=nvml.UUID, nvml=nvml) as monitor:
            assert getattr(monitor, reading)() is None
            others = [n for n, f in FUNCTIONS.items() if f != function]
            assert all(getattr(monitor, other)() is not None for other in others)


def test_a_driver_older_than_the_module_is_none_too(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mismatch(handle: str) -> None:
        raise fake_nvml.NVMLLibraryMismatchError

    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetComputeRunningProcesses", mismatch, raising=False)
    with GpuMonitor(index=0, nvml=fake_nvml) as monitor:
        assert monitor.contended() is None


def test_throttle_reasons_have_names(fake_nvml: FakeNvml) -> None:
    with GpuMonitor(index=0, nvml=fake_nvml) as monitor:
        assert monitor.throttle_reasons() == frozenset()
        fake_nvml.events = 0x4 | 0x40 | 0x10000
        assert monitor.throttle_reasons() == {"sw_power_cap", "hw_thermal_slowdown", "bit_0x10000"}


def test_throttle_reasons_fall_back_to_the_older_name_of_the_function() -> None:
    nvml = FakeNvml(absent=("nvmlDeviceGetCurrentClocksEventReasons",))
    nvml.events = 0x8
    with GpuMonitor(index=0, nvml=nvml) as monitor:
        assert monitor.throttle_reasons() == {"hw_slowdown"}
        nvml.refused.add("nvmlDeviceGetCurrentClocksThrottleReasons")
        assert monitor.throttle_reasons() is None


def test_bit_names_are_those_of_nvml() -> None:
    """Against the constants of pynvml; an older one lacks the last two."""
    prefix = "nvmlClocksThrottleReason"
    known = {n.removeprefix(prefix).lower(): getattr(pynvml, n) for n in dir(pynvml) if n.startswith(prefix)}
    for bit, name in CLOCK_EVENT_REASONS.items():
        plain = name.replace("_", "")
        assert known.get(plain, known.get(f"{plain}setting")) in (bit, None)
    assert set(CLOCK_EVENT_REASONS.values()) > THROTTLING


@pytest.mark.parametrize(
    ("seen", "shared", "expected"),
    [
        ([], [], False),
        ([42], [], False),
        ([7], [], True),
        ([42, 7], [], True),
        ([9001], [], None),
        ([9001, 9002], [], True),
        ([42, 9001], [], True),
        ([42, 43], [43], False),
        ([42, 43, 7], [43], True),
        ([7], [43], True),
        ([9001, 9002], [43], None),
        ([9001, 9002, 9003], [43], True),
        ([9001, 43], [43], True),
    ],
)
def test_contention(fake_nvml: FakeNvml, seen: list[int], shared: list[int], expected: bool | None) -> None:
    """42 is this process, 43 a remote arm's, 7 a stranger; from 9000 on numbers are of the host of a container, where a
    single unknown one may be this process itself."""
    fake_nvml.pids = seen
    with GpuMonitor(index=0, nvml=fake_nvml, pid_exists=lambda pid: pid < 9000, ours=[42]) as monitor:
        monitor.share_with([7])  # forgotten at the next call
        monitor.share_with(shared)
        assert monitor.contended() is expected


def test_state_holds_every_volatile_reading(fake_nvml: FakeNvml) -> None:
    fake_nvml.events, fake_nvml.pids = 0x4, [os.getpid()]
    with GpuMonitor(index=0, nvml=fake_nvml) as monitor:
        assert monitor.state() == {
            "sm_clock_mhz": 1980.0,
            "memory_clock_mhz": 3201.0,
            "power_w": pytest.approx(612.345),
            "power_limit_w": 700.0,
            "temperature_c": 61.0,
            "throttle_reasons": ["sw_power_cap"],
            "memory_used_gib": 2.0,
            "contended": False,
        }


@pytest.mark.parametrize("nvml", [FakeNvml(refused=("nvmlInit",)), FakeNvml(mig=True, refused=("nvmlInit",))])
def test_without_the_library_nothing_is_read_and_the_reason_is_kept(nvml: FakeNvml) -> None:
    with GpuMonitor(uuid=nvml.UUID, nvml=nvml) as monitor:
        assert monitor.problem == "NVML: Not Supported"
        assert set(monitor.state().values()) == {None}
    assert nvml.opened == 0, "what was not opened is not closed"


@pytest.mark.parametrize("which", [{"uuid": "no-such-device"}, {"index": 7}])
def test_an_unknown_device_is_a_problem_and_not_another_device(
    fake_nvml: FakeNvml, which: dict[str, object]
) -> None:
    with GpuMonitor(nvml=fake_nvml, **which) as monitor:
        assert monitor.problem.startswith("NVML: ")
        assert monitor.sm_clock_mhz() is None
    assert fake_nvml.opened == 0


def test_the_library_is_closed_also_after_an_error(fake_nvml: FakeNvml) -> None:
    monitor = GpuMonitor(index=0, nvml=fake_nvml)
    assert monitor.problem == "not opened; use `with`"
    opened: list[int] = []
    with contextlib.suppress(KeyError), monitor:
        opened.append(fake_nvml.opened)
        raise KeyError
    assert opened == [1]
    assert fake_nvml.opened == 0
    assert monitor.problem == "closed"
    assert monitor.sm_clock_mhz() is None


def test_a_missing_pynvml_is_a_problem_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with GpuMonitor(index=0) as monitor:
        assert monitor.problem.startswith("pynvml: ")
        assert monitor.contended() is None


def test_a_cpu_has_the_null_monitor() -> None:
    with monitor_for("cpu") as monitor:
        assert isinstance(monitor, Monitor)
        assert monitor.sm_clock_mhz() is None
        assert monitor.throttle_reasons() is None
        assert monitor.contended() is None
        assert monitor.state() == {}


@pytest.mark.gpu
def test_on_a_gpu_readings_are_plausible() -> None:
    with monitor_for("cuda") as monitor:
        if isinstance(monitor, GpuMonitor) and monitor.problem:
            pytest.skip(monitor.problem)
        clock = monitor.sm_clock_mhz()
        assert clock is None or 100 < clock < 4000
