"""What a conversion keeps and refuses to lose: subclasses, hooks, attributes, children; and the way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from fp8core import (
    Float8Linear,
    Float8LinearConfig,
    GroupedMatmul,
    audit,
    convert_to_float8_training,
    convert_to_high_precision,
    update_scales,
)


class Named(nn.Linear):
    """Only its initialisation differs."""

    def __init__(self, in_features: int, out_features: int, label: str = "q") -> None:
        super().__init__(in_features, out_features)
        self.label = label


class OwnForward(nn.Linear):
    """Models that train with weights of another dtype write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype), self.bias)


class Inherits(OwnForward):
    """A class with its own forward."""


class OwnReset(nn.Linear):
    """Initialised in its own way."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def reason(model: nn.Module, **kwargs: Any) -> str:
    convert_to_float8_training(model, allow_no_conversion=True, **kwargs)
    return audit(model).layers[0].reason


def test_a_subclass_with_nn_linears_forward_is_converted() -> None:
    """Oracle: torchao, which converts by isinstance; attributes of the instance stay, which torchao's layer loses."""
    model = nn.Sequential(Named(32, 48, "query"))
    expected = convert_to_float8_training(copy.deepcopy(nn.Linear(32, 48)), config="rowwise")
    expected.load_state_dict(model[0].state_dict())
    convert_to_float8_training(model, config="rowwise")
    assert isinstance(model[0], Float8Linear)
    assert model[0].label == "query"
    x = torch.randn(16, 32)
    assert torch.equal(model(x), expected(x))


def test_a_subclass_with_its_own_forward_is_refused_until_it_is_named() -> None:
    for kind in (OwnForward, Inherits):
        text = reason(nn.Sequential(kind(32, 48)))
        assert text.startswith(f"class {kind.__name__} has its own forward, which would be lost")
        assert text.endswith(f"pass convert_subclasses=({kind.__name__},)")
        assert reason(nn.Sequential(kind(32, 48)), convert_subclasses=[OwnForward]) == ""
    assert reason(nn.Sequential(OwnForward(32, 48)), convert_subclasses=[Inherits])  # it was not named


def changed(linear: nn.Linear, **attributes: Any) -> nn.Linear:
    vars(linear).update(attributes)
    return linear


def with_buffer() -> nn.Linear:
    linear = nn.Linear(32, 48)
    linear.register_buffer("mask", torch.ones(48))
    return linear


LOST = {
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(32, 48)), "its child 'parametrizations'"),
    "pruned": (
        lambda: prune.random_unstructured(nn.Linear(32, 48), "weight", 0.5),
        "its 'weight_orig' beside weight and bias would be lost",
    ),
    "buffer": (with_buffer, "its 'mask' beside weight and bias would be lost"),
    # as accelerate's hooks do
    "patched": (
        lambda: changed(nn.Linear(32, 48), forward=lambda x: x),
        "its forward was replaced on the instance",
    ),
    "attention": (lambda: nn.MultiheadAttention(32, 2), "nn.MultiheadAttention reads the weight"),
    "own initialisation on meta": (
        lambda: OwnReset(32, 48, device="meta"),
        'it lies on "meta" and class OwnReset has its own reset_parameters',
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_would_lose_something_is_left_alone_with_the_reason(case: str) -> None:
    """Oracle: the output of the untouched model, bit for bit (of a model that has a plain forward)."""
    make, text = LOST[case]
    model = nn.Sequential(make())
    x = torch.randn(16, 32)
    expected = model(x) if case not in ("attention", "own initialisation on meta") else None
    assert text in reason(model)
    assert expected is None or torch.equal(model(x), expected)


def test_own_initialisation_is_no_obstacle_once_it_has_run() -> None:
    assert reason(nn.Sequential(OwnReset(32, 48))) == ""


def test_a_root_linear_with_a_child_raises() -> None:
    """Oracle: torchao's `swap_linear_layers`, which asserts it. Elsewhere the layer is left alone, with the reason."""
    linear = nn.Linear(32, 48)
    linear.extra = nn.Linear(32, 48)
    with pytest.raises(ValueError, match="the model is a Linear with the child 'extra', which would be lost"):
        convert_to_float8_training(linear, allow_no_conversion=True)
    model = convert_to_float8_training(nn.Sequential(linear))
    assert [layer.converted for layer in audit(model).layers] == [False, True]
    assert audit(model).layers[0].reason == "its child 'extra' would be lost"


def _hooked(linear: nn.Linear, calls: list[tuple[str, nn.Module]]) -> list[Any]:
    def note(kind: str) -> Any:
        return lambda module, *_, **__: calls.append((kind, module))

    return [
        linear.register_forward_pre_hook(note("pre")),
        linear.register_forward_hook(note("forward")),
        linear.register_forward_hook(note("with kwargs"), with_kwargs=True),
        linear.register_full_backward_pre_hook(note("backward pre")),
        linear.register_full_backward_hook(note("backward")),
        linear.register_state_dict_post_hook(note("state")),
        linear.register_load_state_dict_pre_hook(note("load")),
        linear.register_load_state_dict_post_hook(note("loaded")),
    ]


def _exercise(model: nn.Module) -> None:
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("way", ["converted", "and back"])
def test_hooks_move_and_their_handles_still_remove_them(way: str) -> None:
    """Oracle: the same hooks on the layer that was: the same calls, each with the layer that is there now."""
    expected: list[tuple[str, nn.Module]] = []
    plain = nn.Sequential(nn.Linear(32, 48))
    _hooked(plain[0], expected)
    _exercise(plain)
    calls: list[tuple[str, nn.Module]] = []
    model = nn.Sequential(nn.Linear(32, 48))
    before = model[0]
    handles = _hooked(before, calls)
    convert_to_float8_training(model, config="delayed")
    if way == "and back":
        convert_to_high_precision(model)
    _exercise(model)
    assert [kind for kind, _ in calls] == [kind for kind, _ in expected]
    assert {kind for kind, _ in calls} >= {"pre", "forward", "with kwargs", "backward", "state", "load"}
    assert {module for kind, module in calls if kind != "loaded"} == {model[0]}
    assert not before._forward_hooks
    for handle in handles:
        handle.remove()
    calls.clear()
    _exercise(model)
    assert not calls


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_the_way_back_is_the_model_that_was(name: str) -> None:
    """Oracle: the unconverted model with the trained weights: classes, state, outputs, attributes."""
    model = nn.ModuleDict(
        {"a": Named(32, 48), "b": nn.Sequential(OwnForward(48, 32)), "c": nn.Linear(32, 48)}
    )
    model["d"] = model["a"]
    model["c"].weight = model["a"].weight
    classes = [type(m) for m in model.modules()]
    convert_to_float8_training(model, config=name, convert_subclasses=[OwnForward])
    x = torch.randn(16, 32)
    model["b"](model["a"](x)).sum().backward()
    update_scales(model)
    plain = copy.deepcopy(convert_to_high_precision(model))
    assert [type(m) for m in model.modules()] == classes
    assert model["d"] is model["a"]
    assert model["c"].weight is model["a"].weight
    assert model["a"].label == "q"
    assert model["a"].weight.grad is not None
    assert torch.equal(model["a"](x), functional.linear(x, model["a"].weight, model["a"].bias))
    assert not [
        name for name in vars(model["a"]) if name.startswith("_fp8core") or name in Float8Linear.STATE
    ]
    assert audit(convert_to_float8_training(plain, config=name)).fp8_gemms > 0


def test_the_way_back_of_single_layers_experts_and_weights_for_fsdp() -> None:
    layer = convert_to_float8_training(
        nn.Linear(32, 48), config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    )
    plain = convert_to_high_precision(layer)
    assert type(plain) is nn.Linear
    assert type(plain.weight.data) is torch.Tensor
    plain.load_state_dict(plain.state_dict())
    assert type(plain.weight.data) is torch.Tensor
    experts = nn.Sequential(GroupedMatmul(config="rowwise"))
    assert convert_to_high_precision(experts)[0].recipe is None
    untouched = nn.Sequential(nn.ReLU())
    assert convert_to_high_precision(untouched) is untouched


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_config_is_in_torchaos_words(name: str) -> None:
    """Oracle: the configuration that the layer was made with, resolved."""
    config = Float8LinearConfig.from_recipe_name(name)
    layer = Float8Linear(32, 48, config=config)
    assert layer.config == config
    assert layer.config.to_recipe() == layer.recipe
    emulated = Float8Linear(32, 48, config=Float8LinearConfig(emulate=True, pad_inner_dim=True)).config
    assert emulated.emulate
    assert emulated.pad_inner_dim
    assert Float8Linear(32, 48, config="delayed").config is None
    assert Float8Linear(128, 128, config="blockwise").config is None
