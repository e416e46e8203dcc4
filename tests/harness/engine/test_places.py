"""Which devices a command line means, one sweep a GPU, and what is no stranger there. Oracles: fakes with known UUIDs, flock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeNvml
from toy import ToySuite

from harness.__main__ import main
from harness.cli import run
from harness.engine import places
from harness.engine.places import Gpu, chosen, gpus
from harness.engine.settings import SweepConfig
from harness.machine import device_lock, environment
from harness.machine.gpu_monitor import GpuMonitor
from harness.store.errors import UsageError

GPUS = [Gpu(i, f"uuid-{i}") for i in range(4)]


def settings(**changes: Any) -> SweepConfig:
    return SweepConfig.of({"name": "toy", "device": "cuda", **changes})


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(device_lock.FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.mark.parametrize(
    ("devices", "indices"),
    [(None, [0]), ("all", [0, 1, 2, 3]), ("2", [2]), ("0,3", [0, 3]), ("[3, 1]", [3, 1]), ("1,1", [1])],
)
def test_devices_name_gpus_by_number(devices: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in chosen(devices, "cuda", GPUS)] == indices


@pytest.mark.parametrize("devices", ["4", "0,4", "", "a", "-1", "0,,1"])
def test_a_gpu_that_is_not_there_is_refused(devices: str) -> None:
    with pytest.raises(UsageError, match=r"expected all, or numbers of visible GPUs \(0, 1, 2, 3\)"):
        chosen(devices, "cuda", GPUS)


class FakeCuda:
    """Two GPUs of a kind; the second one with another memory size."""

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA H200", uuid=f"uuid-{index}", total_memory=(140 - index) * 2**30, multi_processor_count=132,
            L2_cache_size=50 * 2**20, major=9, minor=0,
        )  # fmt: skip


def test_visible_gpus_are_known_by_uuid() -> None:
    assert gpus(FakeCuda()) == GPUS[:2]


def test_a_worker_sees_its_own_gpu_and_its_rows_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    real = environment.of_gpu
    monkeypatch.setattr(environment, "monitor_for", lambda device: GpuMonitor(index=0, nvml=FakeNvml()))
    monkeypatch.setattr(environment, "of_gpu", lambda facts, index: real(facts, index, FakeCuda()))
    found = places.places_for(settings(devices="all"), GPUS[:2], {"device": "cuda", "torch": "2.13"}, 2)
    assert [p.conditions.environ["CUDA_VISIBLE_DEVICES"] for p in found] == ["GPU-uuid-0", "GPU-uuid-1"]
    assert [p.env["gpu_memory_gib"] for p in found] == [140.0, 139.0]
    assert found[0].env["gpu_uuid_hash"] != found[1].env["gpu_uuid_hash"]
    assert all(p.env["torch"] == "2.13" for p in found)
    assert found[0].env_id != found[1].env_id


def test_one_gpu_is_left_as_the_user_made_it_visible() -> None:
    (place,) = places.places_for(settings(), GPUS[:1], {}, 1)
    assert place.conditions.environ == dict(os.environ)
    assert place.conditions.memory_bytes is None
    assert place.env_id is None


HOLD = """
import sys
from harness.machine.device_lock import held
with held(["fake"]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder() -> subprocess.Popen[str]:
    """Another process that holds the lock of a GPU."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_gpu_is_locked_until_its_holder_ends_however_it_does(locks: Path) -> None:
    with holder() as process:
        with (
            pytest.raises(
                UsageError, match=rf"GPU fake is in use by another sweep \(process {process.pid}\)"
            ),
            device_lock.held(["other", "fake"]),
        ):
            pass
        with device_lock.held(["other"]):  # it was let go
            pass
        process.kill()
    with device_lock.held(["fake"]):
        pass
    assert locks.stat().st_mode & 0o1777 == 0o1777, (
        "any user may add the file of a GPU, and remove only his own"
    )
    assert {path.stat().st_mode & 0o777 for path in locks.iterdir()} == {0o644}


def test_two_sweeps_on_one_gpu_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU stands in for the GPU; all but the device is the command line's own."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toy.yaml").write_text("# Does the toy pay?\nsuite: toy\naxes: {n: [1]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(run.SUITES, "toy", ToySuite())
    monkeypatch.setattr(places, "chosen", lambda devices, device, visible: [Gpu(0, "fake")])
    command = ["sweep=toy", "device=cpu", "isolate=false", "rounds=2"]
    with holder() as process:
        assert main(command) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(
            f"error: GPU fake is in use by another sweep (process {process.pid}); wait for it"
        )
        assert not (tmp_path / "results").exists()
        process.kill()
    assert main(command) == 0
