"""history: delayed and static scaling: which amax is in use when, and that it survives saving and moving."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from fp8core import (
    RECIPES,
    AmaxesMissingWarning,
    AmaxHistory,
    Float8Linear,
    Recipe,
    amax_state_dict,
    convert_to_float8_training,
    load_amax_state_dict,
    update_scales,
)
from fp8core.history import ROLES, AmaxMemory


def recipe(**history: object) -> Recipe:
    return dataclasses.replace(RECIPES["delayed"], history=AmaxHistory(**history))


def step(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = layer(x.clone().requires_grad_())
    output.square().mean().backward()
    return output.detach()


def memory(**history: object) -> AmaxMemory:
    return AmaxMemory(recipe(**history))


def feed(m: AmaxMemory, *steps: float) -> list[float]:
    """Amax in use after each step, of the input; the other two roles see 1."""
    used = []
    for amax in steps:
        for role in ("weight", "grad_output"):
            m.record(role, torch.tensor(1.0))
        m.record("input", torch.tensor(amax))
        m.advance()
        used.append(float(m.in_use[0]))
    return used


def test_algorithms() -> None:
    """Oracle: the definition by hand; length 3 forgets the 8 after three steps."""
    steps = (2.0, 8.0, 4.0, 1.0, 0.5)
    assert feed(memory(length=3), *steps) == [2, 8, 8, 8, 4]
    assert feed(memory(length=3, algorithm="most_recent"), *steps) == list(steps)


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_a_state_dict_without_amaxes_is_warned_of_once(name: str) -> None:
    """It comes for weights alone, at the next update; not where amaxes follow, nor where `reset` says that none are meant."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)), config=name)
    step(model, torch.randn(16, 32))
    update_scales(model)
    weights, amaxes = copy.deepcopy(model.state_dict()), copy.deepcopy(amax_state_dict(model))
    for follows in ("nothing", "amaxes", "reset"):
        again = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)), config=name)
        again.load_state_dict(weights)
        step(again, torch.randn(16, 32))
        if follows == "amaxes":
            load_amax_state_dict(again, amaxes)
        if follows == "reset":
            again[0].amaxes.reset()
        if follows == "nothing":
            with pytest.warns(AmaxesMissingWarning, match="0.amaxes"):
                update_scales(again)
        update_scales(again)  # a warning would be an error


def test_all_ranks_take_the_largest_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the maximum by hand; the collective is replaced by what a second rank would contribute. Inf and NaN of one
    rank are seen by all, and so stay out of every history; the others of the same layer do not."""
    theirs = torch.tensor([[9.0, 0.5, 0.5], [float("inf"), 0.5, float("nan")], [-float("nan"), 0.0, 2.0]])
    calls = []

    def all_reduce(tensor: torch.Tensor, op: object, group: object = None) -> None:
        if tensor.dtype == torch.int32:  # amaxes, as bits; another one compares the names of layers
            calls.append(op)
            torch.maximum(tensor, theirs.view(torch.int32) & 0x7FFF_FFFF, out=tensor)

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    layers = nn.Sequential(*(Float8Linear(32, 32, config="delayed") for _ in theirs))
    for layer in layers:
        for role in ROLES:
            layer.amaxes.record(role, torch.tensor(1.0))
    update_scales(layers)
    assert calls == [torch.distributed.ReduceOp.MAX]
    assert [layer.amaxes.in_use.tolist() for layer in layers] == [[9, 1, 1], [0, 1, 0], [0, 1, 2]]


def test_loading_part_of_a_model_keeps_the_amaxes_of_the_rest() -> None:
    """Adapters are loaded so: `load_state_dict(strict=False)` without a layer's weight is not about that layer."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), config="delayed")
    step(model, torch.randn(16, 32))
    update_scales(model)
    before = amax_state_dict(model)["0.amaxes.in_use"].clone()
    with pytest.warns(UserWarning, match="dropped the amaxes"):
        model.load_state_dict({"1.weight": torch.zeros(16, 48)}, strict=False)
    assert torch.equal(model[0].amaxes.in_use, before)
    assert model[0].amaxes.ready
    assert not model[1].amaxes.ready


def test_amaxes_that_do_not_fit_are_refused() -> None:
    model = nn.Sequential(Float8Linear(32, 48, config="delayed"))
    state = amax_state_dict(model)
    assert sorted(state) == ["0.amaxes.history", "0.amaxes.in_use"]
    with pytest.raises(RuntimeError, match=r"missing keys: 0.*unexpected keys: 1"):
        load_amax_state_dict(model, {f"1.{key[2:]}": value for key, value in state.items()})
    load_amax_state_dict(model, {}, strict=False)
    with pytest.raises(ValueError, match=r"amaxes in use are \[nan, nan, nan\]; expected finite"):
        load_amax_state_dict(model, {key: torch.full_like(value, torch.nan) for key, value in state.items()})
    other = nn.Sequential(Float8Linear(32, 48, config=recipe(length=3)))
    with pytest.raises(RuntimeError, match=r"history has shape \[3, 3\]; expected \[3, 1024\]"):
        load_amax_state_dict(model, amax_state_dict(other))
