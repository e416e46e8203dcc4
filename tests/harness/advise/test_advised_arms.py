"""Whether advised arms hold 0.98 of bf16. Oracle: rows made by hand, whose ratios are planted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from report_fixtures import Invented, absent, frame

from harness.advise.advised_arms import FLOOR, advised_arms, verdict
from harness.judge.diagnosis import findings
from harness.store.case import Case
from harness.store.compare import pairs_of
from harness.store.rows import rows_of

if TYPE_CHECKING:
    from harness.store.measurement import Measurement

ON = {"converted": ["up", "down"], "left_in_bf16": {"proj": "0.87x"}, "predicted_step": [1.05, 0.95, 1.16]}
OFF: dict[str, Any] = {
    "converted": [],
    "left_in_bf16": {"up": "", "down": "", "proj": ""},
    "predicted_step": None,
}


def case(model: str = "gpt2", **axes: str) -> Case:
    return Case.of("train", {"model": model, "batch": 16, **axes})


def step(of: Case, gains: dict[str, float], advice: object = ON, noise: float = 0.001) -> list[Measurement]:
    """Arms that are that many times as fast as bf16, whose two copies seem the noise apart."""
    invented = Invented(spread=noise)
    base: dict[str, Any] = {"ms": 100.0, "flops": {"bf16": 1e12}}
    arms: dict[str, dict[str, Any]] = {
        "bf16_eager": base,
        "bf16_eager:again": base | {"baseline": "bf16_eager"},
    }
    for arm, gain in gains.items():
        resolved = {"advice": advice} if advice else {}
        arms[arm] = {
            "ms": 100.0 / gain,
            "baseline": "bf16_eager",
            "flops": {"e4m3": 1e12},
            "resolved": resolved,
        }
    return invented.times(of, arms)


def rows(tmp_path: Path, *cases: list[Measurement]) -> pd.DataFrame:
    return frame(tmp_path, [row for one in cases for row in one])


@pytest.mark.parametrize(
    ("gain", "noise", "outcome"),
    [
        (1.20, 0.001, "holds"),
        (0.985, 0.001, "holds"),
        (0.95, 0.001, "below"),
        (0.98, 0.02, "unclear"),
        (0.975, 0.08, "unclear"),  # two copies of the baseline seem further apart than that
    ],
)
def test_the_whole_interval_decides(tmp_path: Path, gain: float, noise: float, outcome: str) -> None:
    stored = rows(tmp_path, step(case(convert="advised"), {"tensorwise_eager": gain}, noise=noise))
    (found,) = advised_arms(stored)
    assert found.outcome == outcome
    assert (f"{found.model}, {found.arm}" in verdict([found])) is (outcome == "below")
    assert found.speedup == pytest.approx(gain, rel=5 * noise)
    assert found.low < found.speedup < found.high
    assert (found.model, found.arm, found.baseline) == ("gpt2", "tensorwise_eager", "bf16_eager")
    assert (found.converted, found.layers, found.predicted) == (2, 3, 1.05)
    assert advised_arms(stored, pairs_of(rows_of(stored[stored["metric"] == "time_ms"]))) == [found]


def test_an_arm_without_a_number_is_missing(tmp_path: Path) -> None:
    small, large = case("gpt2", convert="advised"), case("llama3_8b", convert="advised")
    stored = rows(
        tmp_path,
        [*step(small, {"tensorwise_eager": 0.9, "rowwise_eager": 1.0}, ON)],
        [
            *step(large, {"tensorwise_eager": 1.2}, OFF),
            absent(large, "delayed_eager", "failed", "out of memory", "bf16_eager"),
        ],
    )
    arms = advised_arms(stored)
    (missing,) = [a for a in arms if a.outcome == "missing"]
    assert (missing.arm, missing.layers) == ("delayed_eager", 0)
    assert math.isnan(missing.speedup)
    assert "out of memory" in missing.reason


def test_an_advice_that_was_wrong_is_a_finding_and_one_that_held_is_none(tmp_path: Path) -> None:
    of = case(convert="advised")
    stored = rows(tmp_path / "a", step(of, {"tensorwise_eager": 0.9}))
    (found,) = [f for f in findings(stored) if "that were advised" in f.symptom]
    assert found.symptom.startswith(f"tensorwise_eager of gpt2 is below {FLOOR:g} of bf16_eager")
    assert "predicted 1.05x" in found.evidence[0]
    assert "ceilings=RUN" in found.change
    held = rows(tmp_path / "b", step(of, {"tensorwise_eager": 1.1}))
    assert not [f for f in findings(held) if "that were advised" in f.symptom]
