"""recipe: the published recipes are torchao's, and a recipe is data."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from recipes import TORCHAO

from fp8core import BACKENDS, RECIPES, Cast, Float8Linear, Gemm
from fp8core.formats import E4M3FN
from fp8core.gemm.reference import Reference

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")


@pytest.mark.parametrize("name", TORCHAO)
def test_recipe_equals_the_one_of_torchao(name: str) -> None:
    """Oracle: torchao's Float8LinearConfig.from_recipe_name, field by field."""
    torchao = pytest.importorskip("torchao.float8")
    theirs = torchao.Float8LinearConfig.from_recipe_name(name)
    recipe = RECIPES[name]
    operands = {
        "cast_config_input": recipe.output.a,
        "cast_config_weight": recipe.output.b,
        "cast_config_grad_output": recipe.grad_input.a,
        "cast_config_weight_for_grad_input": recipe.grad_input.b,
        "cast_config_grad_output_for_grad_weight": recipe.grad_weight.a,
        "cast_config_input_for_grad_weight": recipe.grad_weight.b,
    }
    for field, cast in operands.items():
        config = getattr(theirs, field)
        assert (config.scaling_type.value == "disabled") == (cast is None), field
        if cast is not None:
            assert config.target_dtype == cast.format.dtype, field
            assert (config.scaling_granularity.value == "axiswise") == (cast.granularity == "rowwise"), field
            assert theirs.round_scales_to_power_of_2 == cast.power_of_two, field
    for gemm_name, gemm in recipe.gemms.items():
        assert getattr(theirs, f"gemm_config_{gemm_name}").use_fast_accum == gemm.fast_accum, gemm_name


def test_bad_parts_are_refused_when_the_recipe_is_made() -> None:
    rowwise = RECIPES["rowwise"]
    for said, make in (
        ("nearest: triton", lambda: rowwise.with_backend("tritan")),
        ("nearest: triton", lambda: replace(rowwise, backend="tritan")),
        ("None is unknown", lambda: rowwise.with_backend(None)),
        ("kernels 'on' is unknown", lambda: rowwise.with_kernels("on")),
        ("nearest: rowwise", lambda: Cast(E4M3FN, "row")),
        ("both operands or neither", lambda: Gemm(Cast(E4M3FN), None)),
    ):
        with pytest.raises(ValueError, match=said):
            make()


def test_a_new_backend_is_one_class_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: backend "reference", whose product it doubles. A recipe takes its name, and a layer multiplies by it."""

    class Doubled(Reference):
        def matmul(self, *operands: Any) -> torch.Tensor:
            return 2 * super().matmul(*operands)

    monkeypatch.setitem(BACKENDS, "doubled", Doubled("doubled"))
    layer = Float8Linear(32, 32, bias=False, config=RECIPES["rowwise"].with_backend("doubled"))
    x = torch.randn(16, 32)
    doubled = layer(x)
    layer.recipe = RECIPES["rowwise"].emulated()
    assert torch.equal(doubled, 2 * layer(x))
