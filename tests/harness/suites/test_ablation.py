"""Parts of a recipe alone. Oracles: the recipe's own GEMMs and casts; losses of base and of the emulation, bitwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8core import RECIPES
from harness.report.training import is_candidate
from harness.store.arm import ABLATIONS, GRAD_FORMAT, ONLY_GEMM, ONLY_OPERAND
from harness.store.case import Case
from harness.suites import ablation, divergence
from harness.timing.workload import Trial
from harness.training import batches, meta_estimate

ARMS = {name: info.arm for name, info in divergence.ARMS.items() if info.arm.variant in ABLATIONS}


def run(arm: str, tmp_path: Path) -> tuple[list[float], Trial]:
    axes: dict[str, Any] = {
        "steps": 4,
        "batch": 4,
        "seq": 16,
        "eval_every": 0,
        "eval_batches": 1,
        "diagnose_every": 0,
    }
    given = divergence.points([], {k: [v] for k, v in axes.items()}, None)[0] | axes
    trial = divergence.trial(Case.of("divergence", given), arm, "cpu", tmp_path, lambda step, steps: None)
    return next(list(s.samples) for s in trial.series if s.metric == "loss"), trial


def test_every_part_of_every_dynamic_recipe_is_an_arm() -> None:
    parts = {name: {a.variant for a in ARMS.values() if a.recipe == name} for name in RECIPES}
    assert parts["tensorwise"] == {*ONLY_OPERAND, *ONLY_GEMM, "e4m3_gradients"}
    assert parts["rowwise"] == {*ONLY_OPERAND, *ONLY_GEMM, "e5m2_gradients"}
    assert parts["rowwise_with_gw_hp"] == parts["rowwise"] - {"only_grad_weight"}
    assert parts["delayed"] == parts["static"] == set()  # their amaxes are of earlier steps


@pytest.mark.parametrize("arm", ARMS)
def test_the_recipe_of_an_arm_is_the_part_that_it_names_and_nothing_else(arm: str) -> None:
    record, recipe = ARMS[arm], divergence.recipe_of(arm)
    whole = RECIPES[record.recipe]
    assert recipe is not None
    assert recipe.backend == "reference"
    if record.variant in ONLY_GEMM:
        kept = {name: gemm for name, gemm in recipe.gemms.items() if gemm.is_fp8}
        assert kept == {ONLY_GEMM[record.variant]: whole.gemms[ONLY_GEMM[record.variant]]}
    elif record.variant in GRAD_FORMAT:
        assert recipe.output == whole.output
        for name in ("grad_input", "grad_weight"):
            mine, theirs = recipe.gemms[name], whole.gemms[name]
            assert mine.b == theirs.b
            if theirs.a is not None and mine.a is not None:
                assert (mine.a.format.short, theirs.a.format.short) == (
                    GRAD_FORMAT[record.variant],
                    {"e4m3": "e5m2", "e5m2": "e4m3"}[GRAD_FORMAT[record.variant]],
                )
                assert mine.a.granularity == theirs.a.granularity
    else:
        assert recipe.gemms == whole.gemms
        assert ablation.alteration(record.variant) is not None


def test_the_first_loss_tells_which_parts_the_forward_pass_has(tmp_path: Path) -> None:
    losses = {}
    for arm in ("base", "tensorwise_golden", *(a for a in ARMS if ARMS[a].recipe == "tensorwise")):
        losses[arm], trial = run(arm, tmp_path / arm)
        if arm in ARMS:
            assert trial.resolved["emulated"] is True
    first = {arm: values[0] for arm, values in losses.items()}
    backward_only = ("only_grad_output", "only_grad_input", "only_grad_weight")
    for part in backward_only:
        assert first[f"tensorwise_{part}"] == first["base"], part
    for part in ("only_output", "e4m3_gradients"):
        assert first[f"tensorwise_{part}"] == first["tensorwise_golden"], part
    one_operand = {first["tensorwise_only_input"], first["tensorwise_only_weight"]}
    assert len(one_operand | {first["base"], first["tensorwise_golden"]}) == 4
    assert len({tuple(values) for values in losses.values()}) == len(losses)  # no two arms train alike


def test_nobody_trains_a_part() -> None:
    assert not any(is_candidate(arm) for arm in ARMS.values())


@pytest.mark.parametrize("arm", ["tensorwise_golden", "tensorwise_only_weight", "rowwise_e5m2_gradients"])
def test_an_emulated_arm_rounds_the_layers_that_the_recipe_converts(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the layers of the recipe's own arm. The head is 65 wide, which no FP8 kernel takes and every emulation would."""
    axes: dict[str, Any] = {"model": "nanogpt_char_cpu"}
    given = divergence.points([], {k: [v] for k, v in axes.items()}, None)[0] | axes
    case = Case.of("divergence", given)
    monkeypatch.setattr(batches, "extent_of_case", lambda case: SimpleNamespace(vocab_size=65))
    setups = [divergence.setup_of(case, name) for name in (arm.partition("_")[0], arm)]
    assert meta_estimate.fp8_layers(setups[0]) == meta_estimate.fp8_layers(setups[1])
    assert "head" not in meta_estimate.fp8_layers(setups[1])
