"""The engine from a command to rows, by the same body on a CPU and on a GPU: plan, a process an arm, steps, proof, store, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import store
from harness.__main__ import main

WORDS = [
    "sweep=train", "model=nano", "axes.layers=1", "axes.batch=2", "axes.seq=32", "arms=[bf16_eager,tensorwise_eager]", "rounds=2",
    "timing.min_samples=3", "timing.block_ms=5", "timing.max_block_samples=5", "timing.min_seconds=0.01", "timing.max_seconds=2",
    "timing.warmup_min_seconds=0.01", "timing.warmup_max_seconds=0.5", "report=false",
]  # fmt: skip
METHODS = {"cpu": "perf_counter_adjoining", "cuda": "cuda_events_adjoining"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sweep_of_steps_is_proved_timed_and_resumed(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracles: the arms that were asked for; the clock of each device; a finished run, which has nothing left."""
    where = [f"device={device}", f"results_dir={tmp_path}"]
    assert main([*WORDS, *where, "run_id=one"]) == 0
    rows = store.read(tmp_path)
    assert not (rows["status"] == "failed").any(), list(rows["reason"])
    times = rows[rows["metric"] == "time_ms"]
    assert set(times["status"]) == {"ok"}
    assert set(times["arm"]) >= {"bf16_eager", "tensorwise_eager"}
    assert {json.loads(env)["device"] for env in rows["env"]} == {device}
    assert {json.loads(timing)["method"] for timing in times["timing"]} == {METHODS[device]}
    (fp8,) = (json.loads(text) for text in times.loc[times["arm"] == "tensorwise_eager", "resolved"])
    assert fp8["fp8_gemms"] == fp8["fp8_gemms_expected"] > 0
    assert fp8["verify_outcome"] == "proved"
    assert main([*WORDS, *where, "resume=one"]) == 0
    assert len(store.read(tmp_path)) == len(rows)
    capsys.readouterr()
