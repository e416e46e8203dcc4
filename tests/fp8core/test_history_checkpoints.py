"""Amax histories in checkpoints. Oracle: values written by hand, plain layers."""

from __future__ import annotations

import copy

import pytest
import torch
from histories import recipe, step
from torch import nn

from fp8core import (
    Float8Linear,
    amax_state_dict,
    convert_to_float8_training,
    load_amax_state_dict,
    update_scales,
)
from fp8core.history import ROLES


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amaxes_of_an_old_checkpoint_load_as_float32(dtype: torch.dtype, assign: bool) -> None:
    """Oracle: the checkpoint's values, converted; a bfloat16 amax in use would be rounded at each update."""
    layer = Float8Linear(32, 48, config="delayed")
    step(layer, torch.randn(16, 32))
    update_scales(layer)
    old = layer.state_dict() | amax_state_dict(layer)  # once, amaxes were a part of the model's state
    low = {key: value.to(dtype) for key, value in old.items()}
    again = Float8Linear(32, 48, config="delayed")
    again.load_state_dict(low, assign=assign)
    assert all(buffer.dtype == torch.float32 for buffer in again.amaxes.buffers())
    assert torch.equal(again.amaxes.in_use, low["amaxes.in_use"].float())
    assert again.amaxes.in_use.data_ptr() != low["amaxes.in_use"].data_ptr()
    assert again.amaxes.ready == frozenset(ROLES)


def test_state_dicts_load_strictly_into_the_plain_model_and_back() -> None:
    """Oracle: nn.Module.load_state_dict(strict=True), and equal outputs of the two FP8 models."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    plain = copy.deepcopy(model)
    convert_to_float8_training(model, config="delayed")
    x = torch.randn(16, 32)
    step(model, x)
    update_scales(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict(), strict=True)
    again = convert_to_float8_training(copy.deepcopy(plain), config="delayed")
    again.load_state_dict(plain.state_dict(), strict=True)
    load_amax_state_dict(again, amax_state_dict(model))
    with torch.no_grad():
        assert torch.equal(again(3 * x), model(3 * x))
    model.load_state_dict(plain.state_dict(), strict=True)
    assert not model[0].amaxes.ready


def test_loading_part_of_a_model_keeps_the_amaxes_of_the_rest() -> None:
    """Adapters are loaded so: `load_state_dict(strict=False)` without a layer's weight is not about that layer."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), config="delayed")
    step(model, torch.randn(16, 32))
    update_scales(model)
    before = amax_state_dict(model)["0.amaxes.in_use"].clone()
    model.load_state_dict({"1.weight": torch.zeros(16, 48)}, strict=False)
    assert torch.equal(model[0].amaxes.in_use, before)
    assert model[0].amaxes.ready
    assert not model[1].amaxes.ready


def test_a_meta_model_takes_a_checkpoint_by_assign() -> None:
    """Oracle: the model that was saved; torch leaves buffers that no checkpoint has on "meta"."""
    layer, x = Float8Linear(32, 48, config="delayed"), torch.randn(16, 32)
    step(layer, x)
    update_scales(layer)
    empty = Float8Linear(32, 48, config="delayed", device="meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    load_amax_state_dict(empty, amax_state_dict(layer))
    assert torch.equal(empty(3 * x), layer(3 * x))
    step(empty, x)
    assert empty.amaxes.pending.all()


def test_amaxes_that_do_not_fit_are_refused() -> None:
    model = nn.Sequential(Float8Linear(32, 48, config="delayed"))
    state = amax_state_dict(model)
    assert sorted(state) == ["0.amaxes.history", "0.amaxes.in_use"]
    with pytest.raises(
        RuntimeError, match=r"missing keys: 0\.amaxes\.history, .*; unexpected keys: 1\.amaxes"
    ):
        load_amax_state_dict(model, {f"1.{key[2:]}": value for key, value in state.items()})
    load_amax_state_dict(model, {}, strict=False)
    other = nn.Sequential(Float8Linear(32, 48, config=recipe(length=3)))
    with pytest.raises(RuntimeError, match=r"history has shape \[3, 3\]; expected \[3, 1024\]"):
        load_amax_state_dict(model, amax_state_dict(other))
