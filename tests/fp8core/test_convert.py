"""convert and audit: what is swapped, what is not and why, and the GEMMs that really run."""

from __future__ import annotations

import copy

import pytest
import torch
from recipes import SIXTEENS, changed, on_cpu
from torch import nn

from fp8core import (
    BACKENDS,
    Float8Linear,
    Float8LinearConfig,
    audit,
    convert_to_float8_training,
)


class Block(nn.Module):
    """A made-up layer with the cases that matter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.attention = nn.MultiheadAttention(32, 2)  # its out_proj is a subclass of nn.Linear
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(torch.relu(self.up(x)))))


def reasons(model: nn.Module) -> dict[str, str]:
    return {layer.fqn: layer.reason for layer in audit(model).layers}


def test_swaps_what_it_can_and_says_why_not() -> None:
    """Oracle: the list of layers, written out."""
    model = Block()
    up, state = model.up.weight, copy.deepcopy(model.state_dict())
    assert convert_to_float8_training(model, config="rowwise") is model
    assert [type(m) for m in (model.up, model.down, model.head)] == [Float8Linear, Float8Linear, nn.Linear]
    assert model.up.weight is up
    assert model.state_dict().keys() == state.keys()
    got = reasons(model)
    assert got["up"] == got["down"] == ""
    assert "N=10" in got["head"]
    assert "MultiheadAttention" in got["attention.out_proj"]


@pytest.mark.parametrize("name", SIXTEENS)
def test_a_model_on_the_meta_device_is_converted(name: str) -> None:
    """Oracle: the model converted on its device. "meta" multiplies nothing, so no recipe is refused there; tensors come later."""
    own = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    given = own.state_dict()
    on_device = convert_to_float8_training(copy.deepcopy(own), config=on_cpu(name))
    model = convert_to_float8_training(own.to("meta"), config=name)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu").load_state_dict(given)
    for layer, other in zip(model, on_device, strict=True):
        assert isinstance(layer, Float8Linear)
        layer.recipe = other.recipe  # emulated where the CPU multiplies no such operands
        if layer.passes is not None:
            layer.passes.reset()  # they are initial weights, and no run goes on
    x = torch.randn(16, 32)
    assert torch.equal(model(x), on_device(x))


def test_filter_sees_module_and_name_and_is_recorded() -> None:
    """Oracle: torchao's call, module_filter_fn(module, fqn) of each Linear."""
    seen: list[tuple[str, str]] = []

    def only_up(module: nn.Module, fqn: str) -> bool:
        seen.append((type(module).__name__, fqn))
        return fqn == "up"

    model = convert_to_float8_training(Block(), module_filter_fn=only_up)
    assert ("Linear", "down") in seen
    assert {fqn for _, fqn in seen} == {"up", "down", "attention.out_proj", "head"}
    assert {fqn: "module_filter_fn" in why for fqn, why in reasons(model).items() if "." not in fqn} == {
        "up": False,
        "down": True,
        "head": True,
    }


def test_flop_share() -> None:
    """Oracle: the arithmetic by hand: K x N of each layer times its FP8 GEMMs over all three."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(16, 10))
    convert_to_float8_training(model, config="rowwise_with_gw_hp")
    sizes = (32 * 64, 64 * 16, 16 * 10)
    assert audit(model).fp8_flop_share == pytest.approx(2 * sum(sizes[:2]) / (3 * sum(sizes)))
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16)))
    model[0].weight.requires_grad_(False)
    assert audit(model).fp8_gemms == 2 + 3


def test_converting_nothing_is_an_error_that_explains_itself() -> None:
    with pytest.raises(ValueError, match=r"(?s)allow_no_conversion=True.*N=10"):
        convert_to_float8_training(nn.Sequential(nn.Linear(16, 10)))
    untouched = nn.Sequential(nn.Linear(16, 10))
    assert convert_to_float8_training(untouched, allow_no_conversion=True) is untouched


def test_a_linear_as_root_is_returned_anew() -> None:
    """Oracle: torchao does the same, since there is no parent to change."""
    linear = nn.Linear(32, 16)
    converted = convert_to_float8_training(linear)
    assert isinstance(converted, Float8Linear)
    assert converted.weight is linear.weight
    assert audit(converted).layers[0].fqn == ""


def test_shared_modules_and_parameters_stay_shared() -> None:
    """Oracle: object identity, before and after."""
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(32, 32)})
    model["c"].weight = shared.weight
    convert_to_float8_training(model)
    assert isinstance(model["a"], Float8Linear)
    assert model["a"] is model["b"][0]
    assert model["c"].weight is model["a"].weight is shared.weight
    assert len(audit(model).layers) == 2


def test_converting_again_is_harmless_or_refused() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), config="rowwise")
    first = model[0]
    assert convert_to_float8_training(model, config="rowwise")[0] is first
    with pytest.raises(ValueError, match="already runs recipe rowwise"):
        convert_to_float8_training(model)


def test_two_recipes_in_one_model_by_two_filters() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda _, fqn: fqn == "0")
    convert_to_float8_training(model, config="tensorwise", module_filter_fn=lambda _, fqn: fqn == "1")
    assert [layer.recipe for layer in audit(model).layers] == ["rowwise", "tensorwise"]
    assert set(reasons(model).values()) == {""}


def test_a_device_without_fp8_is_refused_before_anything_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulation is the way out that the message names, and it works."""
    refusing = changed(BACKENDS["torch"], device_reason=lambda *_: "Fake GPU is of 2016")
    monkeypatch.setitem(BACKENDS, "torch", refusing)
    model = Block()
    with pytest.raises(ValueError, match=r"recipe tensorwise: Fake GPU is of 2016"):
        convert_to_float8_training(model)
    assert type(model.up) is nn.Linear
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
