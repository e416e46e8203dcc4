"""Energy and MFU of a trial. Oracles: a fake energy counter whose joules are planted; published peaks and FLOPs by hand."""

from __future__ import annotations

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
from harness.training.ab.plan import AGAIN, BASE, FP8, WITH_GATHER
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
    assert result.unmetered.startswith(
        "a block lasts 403 ms, and the counter moves every ~100 ms: 2 s are needed"
    )
    assert "block=20 gives" in result.unmetered


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
    assert line(of_h200(), "mixed MFU") == (
        "mixed MFU: 50.0% in bf16, 50.0% in FP8, each dtype by its own peak (NVIDIA H200: bf16 989, e4m3 1979, e5m2 1979 "
        "TFLOP/s); of the bf16 peak alone 50.0% and 83.4%"
    )


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


def test_energy_is_told_by_arm_or_why_not() -> None:
    joules = {BASE: ((1, 50.0), (2, 52.0)), AGAIN: ((1, 50.0), (2, 52.0)), FP8: ((1, 40.0), (2, 41.0))}
    told = line(of_h200(joules=joules), "energy")
    assert (
        told
        == "energy of a step with what runs between steps, of the whole board: 51 J in bf16, 40.5 J in FP8; 2 blocks or more "
        "of each"
    )
    assert (
        line(of_h200(unmetered="a block lasts 3 ms"), "energy") == "energy: not measured: a block lasts 3 ms"
    )
    assert "a reading of the counter failed" in line(of_h200(joules={BASE: ((1, 1.0),)}), "energy")


def test_a_cpu_has_neither() -> None:
    assert line(of_h200(device="cpu"), "energy and MFU: not stated, a cpu has")


def test_the_longest_answer_has_at_most_20_lines() -> None:
    times = dict.fromkeys(WITH_GATHER, (100.0,))
    lost = {"base": "planted", "fp8": "planted"}
    rounds = [Round(i, times, times, times, lost if i < 3 else {}) for i in range(9)]
    result = replace(
        of_h200(),
        rounds=tuple(rounds),
        arms=WITH_GATHER,
        proof="FP8 verified",
        gather_proof="FP8 verified",
        slow_rank="rank 1",
        peak_bytes=dict.fromkeys(WITH_GATHER, 2**30),
        notes=("one", "two", "three"),
    )
    assert len(result.lines()) == 19
