"""config: the names of torchao.float8, resolved into one recipe."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from recipes import TORCHAO

from fp8core import RECIPES, Cast, Gemm
from fp8core.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    as_recipe,
)
from fp8core.formats import E4M3FN

ROW = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)


@pytest.mark.parametrize("name", TORCHAO)
def test_configuration_of_a_recipe_resolves_to_it(name: str) -> None:
    """Oracle: the table; by name, by enum, by configuration and by itself."""
    recipe = RECIPES[name]
    assert recipe.name == name
    assert Float8LinearConfig.from_recipe_name(Float8LinearRecipeName(name)).to_recipe() == recipe
    for way in (name, Float8LinearRecipeName(name), recipe, Float8LinearConfig.from_recipe_name(name)):
        assert as_recipe(way) == recipe


def test_every_recipe_has_an_enum_member_and_the_default_is_tensorwise() -> None:
    assert [r for r in RECIPES if r in TORCHAO] == list(TORCHAO) == [m.value for m in Float8LinearRecipeName]
    assert as_recipe(None) == as_recipe(Float8LinearConfig()) == RECIPES["tensorwise"]
    assert [RECIPES[n].fp8_gemms for n in ("tensorwise", "rowwise", "rowwise_with_gw_hp")] == [3, 3, 2]


@pytest.mark.parametrize("name", TORCHAO)
def test_emulation_and_padding_keep_the_recipe(name: str) -> None:
    """A torchtitan bug in reverse: `emulate` must not fall back to the default recipe."""
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True, pad_inner_dim=True)
    recipe = config.to_recipe()
    assert recipe == dataclasses.replace(RECIPES[name], backend="reference", pad_inner_dim=True)


def test_custom_configuration_fills_overrides_from_the_operand_above() -> None:
    """Oracle: torchao's rules for unset overrides and target dtypes, written out."""
    config = Float8LinearConfig(
        cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
        cast_config_weight_for_grad_input=ROW,
        gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=True),
        round_scales_to_power_of_2=True,
    )
    tensor, row = Cast(E4M3FN, power_of_two=True), Cast(E4M3FN, "rowwise", power_of_two=True)
    recipe = config.to_recipe()
    assert recipe.name == "custom"
    assert recipe.output == Gemm(tensor, tensor, fast_accum=True)
    assert recipe.grad_input == Gemm(tensor, row)
    assert recipe.grad_weight == Gemm(tensor, tensor, fast_accum=True)
