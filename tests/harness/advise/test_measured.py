"""Predictions beside measurements. Oracle: stored rows whose times are made from the prediction itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from advise_fixtures import model, round_h200
from report_cases import gemm_cases, linear_cases
from report_fixtures import H200, Invented, frame

from harness.advise import measured
from harness.advise.advice import Check
from harness.advise.command import answer, parse
from harness.advise.layer import layer_cost
from harness.advise.measured import alone
from harness.advise.model import Linear
from harness.advise.plan import Plan
from harness.advise.rates import rates_of
from harness.advise.recipes import candidates
from harness.machine.ceilings import ceilings
from harness.machine.hardware import named
from harness.store.case import Case

if TYPE_CHECKING:
    from pathlib import Path

RATES = round_h200()


def test_products_are_held_against_the_closed_form_not_against_themselves(tmp_path: Path) -> None:
    rows = frame(tmp_path, [r for case in gemm_cases(Invented(1), 780.0) for r in case])
    checks = measured.products(rows, rates_of(named("h200"), ceilings(rows)))
    assert len(checks) == 5 * 3 * 3, "layers, roles, kinds"
    assert any(abs(check.error) > 0.01 for check in checks)
    assert all(0.5 < check.predicted / check.measured < 2 for check in checks)
    assert checks[0].what == "product"


def test_layers_by_recipe_and_mode(tmp_path: Path) -> None:
    rows = frame(tmp_path, [r for case in linear_cases(Invented(1), 780.0) for r in case])
    checks = measured.layers(rows, RATES)
    assert {check.arm for check in checks} == {
        f"{name}_{mode}"
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        for mode in ("eager", "compile")
    }
    one = next(c for c in checks if c.arm == "tensorwise_eager" and c.case == "8192x4096x4096")
    recipe = candidates(False)["tensorwise"]
    assert one.predicted == layer_cost(Linear("", 4096, 4096, 8192, 0), recipe, RATES).speedup
    assert one.measured == pytest.approx(1.1, abs=0.4)


def test_a_layer_alone_takes_the_amax_of_its_input_itself() -> None:
    compiled = candidates(True)["tensorwise"]
    assert alone(compiled).casts["input"].streamed == compiled.casts["input"].streamed + 2
    assert alone(candidates(False)["tensorwise"]) == candidates(False)["tensorwise"]
    assert alone(candidates(True)["rowwise"]) == candidates(True)["rowwise"], "a row is at hand"


def test_an_advised_step_is_predicted_with_its_own_layers(tmp_path: Path) -> None:
    """What was left in bf16 stays there: without the wide layer the step gains next to nothing."""
    of = Case.of("train", {"model": "m", "convert": "advised"})
    base = {"ms": 10.0, "flops": {"bf16": 1e12}}
    fp8 = {"ms": 9.0, "flops": {"e4m3": 1e12}, "baseline": "bf16_eager"}

    def predicted(**resolved: object) -> float:
        arms = {"bf16_eager": base, "tensorwise_eager": fp8 | {"resolved": resolved}}
        rows = frame(tmp_path / str(len(resolved)), Invented(1).times(of, arms))
        both = model(("wide", 8192, 8192), ("narrow", 8192, 128))
        (check,) = measured.steps(rows, RATES, lambda axes, resolved: (both, Plan()))
        return check.predicted

    assert predicted() > 1.2
    assert predicted(advice={"left_in_bf16": {"wide": "0.9x"}}) < 1.01


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
    known = model(("x", 8192, 8192)), Plan()
    assert [c.arm for c in measured.steps(rows, RATES, lambda axes, found: known)] == ["tensorwise_eager"]


def test_errors_and_their_spread() -> None:
    checks = [Check("layer", "", "", p, 1.0, "") for p in (1.1, 1.2, 1.3)]
    assert [round(c.error, 3) for c in checks] == [0.1, 0.2, 0.3]
    assert [c.trusted for c in checks] == [True, True, False]
    said = answer(parse(["model=nano", "gpu=h200", "recipe=tensorwise"]))
    ((count, what, found),) = replace(said, checks=tuple(checks)).check_spreads
    assert (count, what) == (3, "layer")
    assert found.value == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    assert found.low < 1.1 < 1.3 < found.high
    assert not replace(said, checks=tuple(checks[:2])).check_spreads
    assert replace(checks[0], measured=2.0).error == pytest.approx(-0.45)
    assert H200["gpu"] == "NVIDIA H200"
