"""Energy and MFU of a trial. Oracles: a fake energy counter whose joules are planted; published peaks and FLOPs by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeNvml
from loops import Loop, PlantedClock

from harness import ab, store
from harness.machine.gpu_monitor import GpuMonitor
from harness.training.ab.energy import Meter
from harness.training.ab.plan import AGAIN, BASE, FP8
from harness.training.ab.result import Round, TrialResult

BASE_J, FP8_J = 50.0, 40.0


def run(nvml: FakeNvml, step_ms: float) -> tuple[ab.Trial, TrialResult]:
    """A trial whose steps take `step_ms` by the clock and planted joules by the counter."""
    loop = Loop()
    trial = ab.Trial(loop.model, steps=67)  # four rounds of blocks of four
    trial._clock = PlantedClock(lambda count: step_ms)
    trial._monitor = GpuMonitor(uuid=nvml.UUID, nvml=nvml)
    while not trial.done:
        with trial.step():
            if trial._turn is not None:
                nvml.energy_mj += round(1e3 * (FP8_J if trial._turn.is_fp8 else BASE_J))
            loop.step()
    return trial, trial.result()


def test_long_blocks_are_metered_from_the_second_round_on() -> None:
    nvml = FakeNvml()
    _, result = run(nvml, 600.0)
    of_rounds = {
        arm: tuple((i, j) for i in (1, 2, 3)) for arm, j in ((BASE, BASE_J), (AGAIN, BASE_J), (FP8, FP8_J))
    }
    assert result.joules == of_rounds
    assert nvml.opened == 0, "NVML is let go at the end"


def test_short_blocks_are_not_metered_and_it_is_said_how_long_they_are() -> None:
    _, result = run(FakeNvml(), 100.0)
    assert result.joules == {}
    assert "403 ms" in result.unmetered
    assert "block=20" in result.unmetered


def test_a_counter_that_cannot_be_read_is_told() -> None:
    _, result = run(FakeNvml(refused=("nvmlDeviceGetTotalEnergyConsumption",)), 600.0)
    assert result.joules == {}
    assert result.unmetered == "the counter of the board's energy cannot be read here"


def test_a_slice_of_a_board_has_no_energy_of_its_own() -> None:
    nvml = FakeNvml(mig=True)
    meter = Meter(torch.device("cpu"), GpuMonitor(uuid=nvml.UUID, nvml=nvml))
    meter.judge(10.0, 4)
    assert not meter.reads


def test_without_a_gpu_no_energy_is_claimed() -> None:
    meter = Meter(torch.device("cpu"))
    meter.judge(10.0, 4)
    assert not meter.reads
    assert meter.why_not == "a cpu has no counter here"
    meter.close()


def test_energy_is_stored_by_token(tmp_path: Path) -> None:
    trial, _ = run(FakeNvml(), 600.0)
    rows = store.read([trial.save(tmp_path)])
    energy = rows[rows["metric"] == "joules_per_token"].set_index("arm")
    assert list(energy["status"]) == ["ok", "ok"]
    assert energy.loc["base", "value"] == pytest.approx(BASE_J / 16)
    assert energy.loc["tensorwise", "value"] == pytest.approx(FP8_J / 16)
    assert list(energy.loc["base", "rounds"]) == [1, 2, 3]


def test_energy_that_was_not_measured_is_a_skipped_row(tmp_path: Path) -> None:
    trial, _ = run(FakeNvml(), 100.0)
    rows = store.read([trial.save(tmp_path)])
    energy = rows[rows["metric"] == "joules_per_token"]
    assert set(energy["status"]) == {"skipped"}
    assert "a block lasts 403 ms" in energy["reason"].iloc[0]


def of_h200(**changes: Any) -> TrialResult:
    """Steps of 100 ms in bf16 and 60 ms in FP8, with some 49 TFLOP, of which FP8 takes all but 9.89."""
    rounds = tuple(Round(i, {BASE: (100.0,), AGAIN: (100.0 + 0.01 * i,), FP8: (60.0,)}) for i in range(6))
    flops = {BASE: {"bf16": 49.45e12}, FP8: {"bf16": 9.89e12, "e4m3": 29.58e12, "e5m2": 10.0e12}}
    found = TrialResult("tensorwise", "cuda", rounds, "cuda_events_adjoining", proved=True)
    given: dict[str, Any] = {"flops": flops, "gpu": ("NVIDIA H200", 139.8), "tokens": 4096.0}
    return replace(found, **(given | changes))


def line(result: TrialResult, start: str) -> str:
    (found,) = [each for each in result.lines() if each.startswith(start)]
    return found


def test_mixed_mfu_stands_with_its_denominators() -> None:
    """By hand, with NVIDIA's 989 and 1979 TFLOP/s: 50 ms of 100; 10 ms and 39.58 / 1979 = 20 ms of 60."""
    assert re.findall(r"[\d.]+%", line(of_h200(), "mixed MFU")) == ["50.0%", "50.0%", "50.0%", "83.4%"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": ("NVIDIA Unheard", 80.0)}, "NVIDIA Unheard is not in the table of peaks"),
        ({"gpu": None}, "is not in the table of peaks"),
        ({"flops": {BASE: {"unknown": 1e12}, FP8: {"e4m3": 1e12}}}, "the dtype of some product, or its peak"),
        ({"flops": {}}, "the dtype of some product"),
        (
            {"flops": {BASE: {"bf16": 1e15}, FP8: {"e4m3": 1e15}}},
            "it would be above the peaks of NVIDIA H200",
        ),
    ],
)
def test_an_mfu_that_is_not_known_is_not_stated(changes: dict[str, Any], words: str) -> None:
    told = line(of_h200(**changes), "MFU: not stated")
    assert words in told
    assert "%" not in told
