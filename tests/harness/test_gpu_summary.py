"""The last lines of a GPU session. Oracle: rows made by hand, whose figures the lines must repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import store
from harness.gpu_summary import LINES, lines, of_tests
from harness.measurement import Measurement

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


def stored(folder: Path, rows: list[Measurement]) -> pd.DataFrame:
    writer = store.RunWriter(folder, run_id="r", sweep="s", env_id="e", env={"device": "cuda"}, about={})
    writer.append(rows)
    writer.close("finished")
    return store.read(folder)


def step(arm: str, ms: float, baseline: str = "", model: str = "llama3_8b") -> Measurement:
    return Measurement(
        "train", model, arm, f'{{"model":"{model}"}}', "time_ms", "ok", baseline=baseline, regime="isolated",
        samples=(ms * 0.999, ms, ms * 1.001) * 3, rounds=(0, 0, 0, 1, 1, 1, 2, 2, 2),
    )  # fmt: skip


def test_every_kind_of_row_has_its_line(tmp_path: Path) -> None:
    cube = '{"what":"%s","cube":8192}'
    rows = [
        step("bf16_eager", 120.0),
        step("tensorwise_eager", 100.0, "bf16_eager"),
        Measurement("ceilings", "m", "device", cube % "mm_bf16", "time_ms", "ok", samples=(1.4,) * 3),
        Measurement(
            "ceilings", "f", "device", cube % "mm_fp8_tensorwise", "time_ms", "ok", samples=(0.7,) * 3
        ),
        Measurement(
            "ceilings",
            "c",
            "device",
            '{"what":"copy"}',
            "time_ms",
            "ok",
            samples=(1.0,) * 3,
            bytes_moved=4.3e9,
        ),
        Measurement("codes", "c1", "plain", "{}", "mismatches", "ok", samples=(28.0,)),
        Measurement("codes", "c2", "plain", "{}", "mismatches", "ok", samples=(2.0,)),
        Measurement("accumulation", "a1", "fast", "{}", "fp22_sqnr_db", "ok", samples=(90.0,)),
        Measurement("accumulation", "a1", "fast", "{}", "accum_sqnr_db", "ok", samples=(23.0,)),
        Measurement(
            "accumulation", "a2", "fast", "{}", "fp22_sqnr_db", "ok", samples=(95.0,)
        ),  # the worst is told
        Measurement("gemm", "g", "fp8_rowwise", "{}", "time_ms", "failed", reason="numerics: too far off"),
    ]
    said = lines(stored(tmp_path, rows), "...\n==== 57 passed, 3 skipped in 33.21s ====\n")
    assert said == [
        "tests: 57 passed, 3 skipped in 33.21s",
        "failed: 1 rows, first fp8_rowwise: numerics: too far off",
        "ceilings: bf16 matmul 785.4 TFLOP/s, fp8 matmul 1571 TFLOP/s, copy 4.30 TB/s",
        "codes that differ from the format's: plain 30",
        "sums of fast: 90 dB fp22, 23 dB accum",
        "step of llama3_8b, tensorwise_eager against bf16_eager: 1.200x (1.200 to 1.200), 100.0 ms",
    ]


def test_it_never_passes_twenty_lines(tmp_path: Path) -> None:
    rows = [step("bf16_eager", 10.0)] + [step(f"arm{i}_eager", 9.0, "bf16_eager") for i in range(30)]
    said = lines(stored(tmp_path, rows), "")
    assert len(said) == LINES
    assert said[-1] == "and 11 more in the report"


def test_tests_that_did_not_run_have_no_line() -> None:
    assert of_tests("") == of_tests("Killed\n") == []
    assert of_tests("1 failed, 2 passed in 3.10s") == ["tests: 1 failed, 2 passed in 3.10s"]
