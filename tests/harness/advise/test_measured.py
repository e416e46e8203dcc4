"""Predictions beside measurements. Oracle: stored rows whose times are made from the prediction itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from advise_fixtures import model, round_h200
from report_fixtures import Invented, frame

from harness.advise import measured
from harness.advise.advice import Check
from harness.advise.command import _checks, answer, parse
from harness.advise.gpu import gpu_and_rows
from harness.advise.rates import rates_of
from harness.machine.ceilings import ceilings
from harness.store.case import Case
from harness.training.step import Step

RATES = round_h200()


def test_a_recorded_step_is_held_against_no_prediction(tmp_path: Path) -> None:
    """Those of eager steps have launches in them that it doesn't wait for."""
    bf16, e4m3 = {"bf16": 1e12}, {"e4m3": 1e12}
    arms = {
        "bf16_eager": {"ms": 10.0, "flops": bf16},
        "tensorwise_eager": {"ms": 9.0, "flops": e4m3, "baseline": "bf16_eager"},
        "bf16_graph": {"ms": 8.0, "flops": bf16, "baseline": "bf16_eager"},
        "tensorwise_graph": {"ms": 7.0, "flops": e4m3, "baseline": "bf16_graph"},
    }
    rows = frame(tmp_path, Invented(1).times(Case.of("train", {"model": "m"}), arms))
    known = model(("x", 8192, 8192)), Step(compiled=True)
    assert [c.arm for c in measured.steps(rows, RATES, lambda axes, found: known)] == ["tensorwise_eager"]


def test_errors_and_their_spread() -> None:
    checks = [Check("layer", "", "", p, 1.0, "") for p in (1.1, 1.2, 1.3)]
    said = answer(parse(["model=nano", "gpu=h200", "recipe=tensorwise"]))
    ((count, what, found),) = replace(said, checks=tuple(checks)).check_spreads
    assert (count, what) == (3, "layer")
    assert found.value == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    assert found.low < 1.1 < 1.3 < found.high
    assert not replace(said, checks=tuple(checks[:2])).check_spreads
    assert [c.trusted for c in checks] == [True, True, False]


def test_the_measured_steps_of_the_h200_lie_inside_the_intervals_that_its_own_rates_give() -> None:
    """Oracle: the published rows of 2026-11-27, 1.40x and 1.41x eager, 1.415x compiled."""
    day = Path(__file__).parents[3] / "results/published/h200/2026-11-27"
    device, rows = gpu_and_rows(
        "", [str(day / run) for run in ("eager", "nocompile", "compiled", "ceilings", "gemm")]
    )
    assert rows is not None
    steps = [c for c in _checks(rows, rates_of(device, ceilings(rows))) if c.what == "step"]
    assert sorted(c.arm for c in steps) == ["tensorwise_compile", "tensorwise_eager", "tensorwise_eager"]
    assert [c for c in steps if not c.inside] == []
    words = "model=llama3_8b", "tokens=16384", "seq=4096", f"runs={day / 'ceilings'}"
    unmeasured = [answer(parse([*words, f"mode={mode}"])).not_measured for mode in ("eager", "compile")]
    assert [any("casts" in part for part in parts) for parts in unmeasured] == [False, True]


@pytest.mark.parametrize(("measured", "inside"), [(1.1, True), (1.3, True), (1.31, False), (1.09, False)])
def test_a_check_says_whether_the_measurement_lies_inside(measured: float, inside: bool) -> None:
    assert Check("step", "", "", 1.2, measured, "", 1.1, 1.3).inside is inside
    assert not Check("step", "", "", 1.2, measured, "").inside, "an interval that is not known holds nothing"
