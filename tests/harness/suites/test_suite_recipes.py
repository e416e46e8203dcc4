"""Oracles: bytes counted by hand from the recipes' equations (elements read and written by each pass), FP8's known SQNR.

Recipes are taken from RECIPES as it is, so that one added later is checked here without a change.
"""

from __future__ import annotations

from typing import Any

import pytest

from fp8core.recipe import RECIPES
from harness.store.case import Case
from harness.suites import linear, recipes

AXES: dict[str, Any] = {"shape_set": "custom", "layer": "custom", "M": 128, "K": 256, "N": 128}
CASE = Case.of("recipes", AXES)


def figures(recipe: str, case: Case = CASE) -> tuple[dict[str, object], dict[str, float]]:
    workload = recipes.build(case, f"{recipe}_eager", "cpu")
    numerics = workload.check()
    assert numerics.ok, numerics.reason
    return dict(workload.resolved), dict(numerics.values)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_right_and_says_whether_it_is_emulated(name: str) -> None:
    four_bits = RECIPES[name].is_four_bit
    resolved, values = figures(name)
    emulated = four_bits or linear.gemms_unsupported(CASE, RECIPES[name], "cpu") is not None
    own = {"torch": "torch", "triton": "triton, its plain twin"}.get(RECIPES[name].backend)
    assert resolved["backend"] == ("reference" if emulated else own)
    assert ("emulated" in resolved) == emulated
    assert resolved["fp8_gemms"] == (0 if emulated else RECIPES[name].fp8_gemms)
    flops = recipes.build(CASE, f"{name}_eager", "cpu").flops
    assert sum(flops.values()) == recipes.work(CASE)
    assert any(dtype in ("e4m3", "e5m2") for dtype in flops) != emulated
    assert {"sqnr_db", "grad_input_sqnr_db", "grad_weight_sqnr_db"} < set(values)
    assert ("cast_bytes_per_elem" in values) != four_bits  # no kernel's bytes are counted


# Bytes


# Per element: 2 read to cast, 2 more where an amax of far elements is needed, 1 for each layout, and block scales.
BYTES = {
    "tensorwise": 2 + 2 + 1 + 1,
    "rowwise": 2 + 2 + 1 + 1,
    "delayed": 2 + 1 + 1,
    "static": 2 + 1 + 1,
    "mxfp8": 2 + 2 * (1 + 1 / 32),
}


@pytest.mark.parametrize(("name", "expected"), BYTES.items())
def test_bytes_of_casts_by_hand(name: str, expected: float) -> None:
    assert figures(name)[1]["cast_bytes_per_elem"] == pytest.approx(expected, rel=1e-12)
