"""The last lines of a GPU session. Oracle: rows made by hand, whose figures the lines must repeat."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from harness import store
from harness.advise.measured import Check
from harness.report.summary import LINES, NANOGPT, lines
from harness.store.measurement import Measurement

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
        Measurement("gemm", "g", "rowwise_eager", "{}", "time_ms", "failed", reason="numerics: too far off"),
        Measurement(
            "tests",
            "t",
            "pytest",
            "{}",
            "tests_failed",
            "ok",
            samples=(0.0,),
            resolved={"passed": 57, "failures": 0, "errors": 0, "skipped": 3},
        ),
    ]
    said = lines(stored(tmp_path, rows))
    assert said == [
        "tests: 57 passed, 0 failed, 3 skipped",
        "failed: 1 rows, first rowwise_eager: numerics: too far off",
        "step: tensorwise_eager at least 1.15x of bf16 eager: PASS, 1.200x (1.200 to 1.200) on llama3_8b",
        "step: tensorwise_eager above float8nocompile beyond noise: not measured (its baseline "
        "nocompile_tensorwise_eager was not measured in this run)",
        "step: tensorwise_compile not below torchao compile: not measured (no row of tensorwise_compile)",
        "step of llama3_8b: bf16_eager 120 ms; tensorwise_eager 100, 1.200x (1.200 to 1.200) of bf16_eager",
        "ceilings: bf16 matmul 785.4 TFLOP/s, fp8 matmul 1571 TFLOP/s, copy 4.30 TB/s",
        "prediction of layers: not measured (needs layers of a GPU of the peak table)",
        "codes that differ from the format's: plain 30",
        "sums, dB against each model of them: fast 90 fp22 / 23 accum",
    ]


def test_shares_are_of_what_was_measured_here(tmp_path: Path) -> None:
    """Casts against a copy of as many bytes, products against the suite `ceilings`, the fastest arm of each shape."""

    def timed(suite: str, case: str, arm: str, axes: str, ms: float, **more: Any) -> Measurement:
        return Measurement(
            suite, case, arm, axes, "time_ms", "ok", samples=(ms,) * 3, regime="isolated", **more
        )

    copy = '{"what":"copy"}'
    large = '{"what":"%s","cube":1000}'
    rows = [
        timed("ceilings", "c1", "device", copy, 1.0, bytes_moved=1e9),  # 1 TB/s
        timed("ceilings", "c2", "device", copy, 1.0, bytes_moved=4e9),  # 4 TB/s
        timed("ceilings", "p1", "device", large % "mm_bf16", 1.0),  # 2 TFLOP/s
        timed("ceilings", "p2", "device", large % "mm_fp8_tensorwise", 0.5),  # 4 TFLOP/s
        timed("cast", "a", "fused", "{}", 1.0, bytes_moved=0.9e9),
        timed("cast", "b", "fused", "{}", 2.0, bytes_moved=4e9),
        timed("cast", "a", "eager", "{}", 4.0, bytes_moved=0.9e9),
        timed("cast", "b", "torchao_compile", "{}", 0.1, bytes_moved=4e9, resolved={"peer": "torchao"}),
        *(
            timed("gemm", f"g{i}", arm, "{}", ms, flops={dtype: 1e9})
            for i in range(2)
            for arm, dtype, ms in [
                ("bf16", "bf16", 1.0 + i),
                ("tensorwise_eager", "e4m3", 0.8),
                ("rowwise_eager", "e4m3", 0.5),
            ]
        ),
        # Another sum than that of the ceiling, and a peer's: neither counts.
        timed(
            "gemm",
            "g0",
            "tensorwise_fast_eager",
            "{}",
            0.1,
            flops={"e4m3": 1e9},
            resolved={"use_fast_accum": True},
        ),
        timed("gemm", "g0", "torchao", "{}", 0.1, flops={"e4m3": 1e9}, resolved={"peer": "torchao"}),
        Measurement("gemm", "g2", "bf16", "{}", "time_ms", "skipped", reason="no room"),
    ]
    said = "\n".join(lines(stored(tmp_path, rows)))
    assert "casts (fused): best 90%, median 70% of a copy of the same size, 2 cases; asked 92%" in said
    assert (
        "products, the fastest arm of each shape: bf16 best 50%, median 38% of 2 TFLOP/s (2 shapes), "
        "fp8 best 50%, median 50% of 4 TFLOP/s (2 shapes)" in said
    )


@pytest.mark.parametrize(("error", "outcome"), [(0.10, "PASS"), (0.20, "FAIL")])
def test_the_prediction_of_layers_is_held_against_its_bar(tmp_path: Path, error: float, outcome: str) -> None:
    checks = [Check("layer", f"case{i}", "tensorwise_eager", 1.0 + error, 1.0, "r") for i in range(4)]
    checks.append(Check("layer", "far", "rowwise_eager", 0.4, 1.0, "r"))
    said = lines(stored(tmp_path, [step("bf16_eager", 1.0)]), checks)
    (line,) = (line for line in said if line.startswith("prediction of"))
    assert line == (
        f"prediction of 5 layers: median error {error:.1%}, asked 15%: {outcome}; worst -60%, rowwise_eager far"
    )


def trained(arm: str, seed: int, best: float, **axes: object) -> list[Measurement]:
    """A run whose training loss is the same in both arms, and whose best held-out loss is not its last."""
    named = json.dumps({**NANOGPT, "seed": seed, **axes})
    case = f"{seed}{axes}"
    steps = tuple(range(60))
    loss = tuple(4.0 - 0.04 * s + 1e-6 * len(arm) + 1e-3 * ((s * 7 + seed) % 5) for s in steps)
    return [
        Measurement("divergence", case, arm, named, "loss", "ok", samples=loss, rounds=steps),
        Measurement(
            "divergence",
            case,
            arm,
            named,
            "heldout_loss",
            "ok",
            samples=(4.2, best, best + 0.1),
            rounds=(0, 30, 60),
        ),
    ]


@pytest.mark.parametrize(
    ("seeds", "fp8", "axes", "told"),
    [
        (3, 1.48, {}, "; published 1.47 +- 0.02: PASS"),
        (3, 1.50, {}, "; published 1.47 +- 0.02: FAIL, tensorwise"),
        (2, 1.48, {}, "; published 1.47 +- 0.02: INCONCLUSIVE, fewer than 3 seeds"),
        (3, 1.48, {"steps": 60}, ""),  # another setting: there is nothing to compare with
    ],
)
def test_the_best_validation_loss_stands_beside_the_published_one(
    tmp_path: Path, seeds: int, fp8: float, axes: dict[str, object], told: str
) -> None:
    rows = [
        row
        for seed in range(seeds)
        for arm, best in (("base", 1.47), ("tensorwise", fp8))
        for row in trained(arm, seed, best, **axes)
    ]
    said = lines(stored(tmp_path, rows))
    (line,) = (line for line in said if line.startswith("best validation loss: "))
    shown = ", ".join([f"{fp8:.3f}"] * seeds)
    assert f"tensorwise {fp8:.3f} (seeds {shown})" in line
    assert line.endswith(told or ")")
    (verdict,) = (line for line in said if line.startswith("loss of nanogpt_char: tensorwise against base "))
    assert seeds >= 3 or "INCONCLUSIVE" in verdict


def test_another_model_says_nothing_about_the_published_loss(tmp_path: Path) -> None:
    """Pooled with a model at 1.34, nanoGPT at 1.60 would have a mean of 1.47."""
    rows = [
        row
        for seed in range(3)
        for model, best in (("nanogpt_char", 1.60), ("other", 1.34))
        for arm in ("base", "tensorwise")
        for row in trained(arm, seed, best, model=model)
    ]
    said = lines(stored(tmp_path, rows))
    first, second = (line for line in said if line.startswith("best validation loss"))
    assert first.startswith("best validation loss of nanogpt_char: base 1.600 (seeds 1.600, 1.600, 1.600)")
    assert first.endswith("; published 1.47 +- 0.02: FAIL, base, tensorwise")
    assert second.startswith("best validation loss of other: base 1.340 ")
    assert "published" not in second
    verdicts = [line.partition(" against base ")[0] for line in said if line.startswith("loss of ")]
    assert verdicts == ["loss of nanogpt_char: tensorwise", "loss of other: tensorwise"]


def test_two_settings_of_a_model_are_told_apart(tmp_path: Path) -> None:
    rows = [
        row
        for seed in range(3)
        for batch, best in ((64, 1.60), (32, 1.34))
        for row in trained("base", seed, best, batch=batch)
    ]
    said = lines(stored(tmp_path, rows))
    first, second = (line for line in said if line.startswith("best validation loss"))
    assert first.startswith("best validation loss of nanogpt_char batch=64: base 1.600")
    assert first.endswith("published 1.47 +- 0.02: FAIL, base")
    assert second.startswith("best validation loss of nanogpt_char batch=32: base 1.340")
    assert "published" not in second


def test_one_seed_run_three_times_is_one_seed(tmp_path: Path) -> None:
    rows = [row for again in range(3) for row in trained("base", 0, 1.47, again=again)]
    same = [dataclasses.replace(row, axes=json.dumps({**NANOGPT, "seed": 0})) for row in rows]
    (line,) = (x for x in lines(stored(tmp_path, same)) if x.startswith("best validation loss"))
    assert line.endswith("INCONCLUSIVE, fewer than 3 seeds")


def test_it_never_passes_twenty_lines(tmp_path: Path) -> None:
    rows = [step("bf16_eager", 10.0, model=f"m{i}") for i in range(30)]
    rows += [step("tensorwise_eager", 9.0, "bf16_eager", model=f"m{i}") for i in range(30)]
    said = lines(stored(tmp_path, rows))
    assert len(said) == LINES
    assert said[-1] == "and 15 more in the report"


def test_tests_that_did_not_run_have_no_line(tmp_path: Path) -> None:
    assert not any(line.startswith("tests: ") for line in lines(stored(tmp_path, [step("bf16_eager", 1.0)])))
