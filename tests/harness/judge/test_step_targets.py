"""The bars of a training step. Oracle: rows written by hand, whose ratio and noise are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_fixtures import Invented, absent, write_run

from harness import store
from harness.judge.step_targets import BARS, held
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.measurement import Measurement

EAGER, PEER, COMPILED = range(len(BARS))


def step(spread: float = 0.0, model: str = "llama3_8b", work: float = 1e15, **ms: float) -> list[Measurement]:
    """A case whose arms take so many milliseconds, with the control that shows its noise."""
    case = Case.of("train", {"model": model, "batch": 4})
    arms = {
        arm: {
            "ms": time,
            "baseline": "" if arm == "bf16_eager" else f"bf16_{arm.rpartition('_')[2]}",
            "flops": {"bf16" if arm.startswith("bf16") else "e4m3": work},
        }
        for arm, time in ms.items()
    }
    again = {"ms": ms["bf16_eager"], "baseline": "bf16_eager", "flops": {"bf16": work}}
    return Invented(spread=spread, rounds=6).times(case, {**arms, "bf16_eager:again": again})


@pytest.mark.parametrize(
    ("bar", "spread", "ms", "outcome"),
    [
        (EAGER, 0.001, {"tensorwise_eager": 83.0}, "PASS"),
        (EAGER, 0.001, {"tensorwise_eager": 90.0}, "FAIL"),
        (EAGER, 0.02, {"tensorwise_eager": 87.0}, "INCONCLUSIVE"),
        (PEER, 0.001, {"tensorwise_eager": 83.0, "nocompile_tensorwise_eager": 90.0}, "PASS"),
        (PEER, 0.001, {"tensorwise_eager": 90.0, "nocompile_tensorwise_eager": 90.0}, "FAIL"),
        (PEER, 0.2, {"tensorwise_eager": 83.0, "nocompile_tensorwise_eager": 90.0}, "INCONCLUSIVE"),
        (COMPILED, 0.001, {"tensorwise_compile": 83.0, "torchao_tensorwise_compile": 83.0}, "PASS"),
        (COMPILED, 0.001, {"tensorwise_compile": 90.0, "torchao_tensorwise_compile": 83.0}, "FAIL"),
    ],
)
def test_a_bar_is_passed_by_the_interval_and_beyond_the_noise(
    tmp_path: Path, bar: int, spread: float, ms: dict[str, float], outcome: str
) -> None:
    rows = step(spread, bf16_eager=100.0, **ms)
    said = held(store.read(write_run(tmp_path, [rows])))[bar]
    assert said.outcome == outcome
    assert said.low <= said.ratio <= said.high
    assert said.ratio == pytest.approx(ms.get(BARS[bar].against, 100.0) / ms[BARS[bar].arm], rel=0.1 + spread)
    assert f"{outcome}, {said.ratio:.3f}x" in str(said)


def test_what_is_not_there_is_not_measured_and_says_why(tmp_path: Path) -> None:
    rows = step(bf16_eager=100.0, tensorwise_eager=80.0)
    case = Case.of("train", {"model": "llama3_8b", "batch": 4})
    rows.append(absent(case, "nocompile_tensorwise_eager", "skipped", "no torchao here", "bf16_eager"))
    said = [str(one) for one in held(store.read(write_run(tmp_path, [rows])))]
    assert "not measured (its baseline nocompile_tensorwise_eager was skipped: no torchao here)" in said[PEER]
    assert "not measured (no row of tensorwise_compile)" in said[COMPILED]
    nothing = held(store.read(write_run(tmp_path / "none", [[absent(case, "bf16_eager", "failed", "lost")]])))
    assert {one.outcome for one in nothing} == {"not measured"}


def test_one_model_decides_and_the_ratio_of_another_is_told_without_a_verdict(tmp_path: Path) -> None:
    small = step(model="gpt2", work=1e12, bf16_eager=10.0, tensorwise_eager=20.0)
    larger = step(model="llama3_70b", work=1e16, bf16_eager=100.0, tensorwise_eager=200.0)
    asked = step(bf16_eager=100.0, tensorwise_eager=80.0)
    (said, *_) = held(store.read(write_run(tmp_path / "all", [small, asked, larger])))
    assert (said.model, said.outcome) == ("llama3_8b", "PASS")
    (said, *_) = held(store.read(write_run(tmp_path / "others", [small, larger])))
    assert said.outcome == "not measured"
    assert "no step of llama3_8b was timed; 0.500x (0.500 to 0.500) on llama3_70b" in str(said)


def test_a_bar_of_a_case_that_was_cut_off_names_its_rounds(tmp_path: Path) -> None:
    """By the pairs, whatever the reason of the rows says."""
    rows = [
        replace(r, status="partial", reason="any words, in any order", cause=Cause.BUDGET)
        for r in step(0.001, bf16_eager=100.0, tensorwise_eager=83.0)
    ]
    said = held(store.read(write_run(tmp_path, [rows])))[EAGER]
    assert (said.outcome, said.rounds) == ("INCONCLUSIVE", 6)
    assert str(said).endswith(", cut off after 6 rounds")
