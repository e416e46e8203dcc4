"""microbatch: results of the uncached run bit for bit, and every way in which a weight can change is noticed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recipes import SIXTEENS, on_cpu
from torch import nn

from fp8core import Float8Linear, convert_to_float8_training, microbatches


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    return convert_to_float8_training(model, config=on_cpu(name))


def batches(n: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(n, 16, 32, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", SIXTEENS)
def test_weights_are_cast_once(name: str) -> None:
    """Oracle: casts, counted. That their results are those without the scope: test_situations.py."""
    model = model_of(name)
    layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
    with microbatches(model):
        for x in batches():
            model(x.requires_grad_()).square().mean().backward()
        assert [(m.weight_cache.hits, m.weight_cache.misses) for m in layers] == [(3, 1)] * 2
    assert all(m.weight_cache is None for m in layers)


def scramble(weight: torch.Tensor) -> torch.Tensor:
    """Other values in the same shape, with the same sum."""
    return weight.detach().flip(0).clone()


def load(model: nn.Module, assign: bool) -> None:
    state = model.state_dict()
    model.load_state_dict({k: scramble(v) if v.dim() > 1 else v for k, v in state.items()}, assign=assign)


CHANGES: dict[str, Callable[[Any], object]] = {
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True).step(),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step(),
    "AdamW loop": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False).step(),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True).step(),
    "load_state_dict": lambda m: load(m, assign=False),
    "load_state_dict assign": lambda m: load(m, assign=True),
    "in place": lambda m: torch.no_grad()(m[0].weight.mul_)(1.5),
    "new data": lambda m: setattr(m[0].weight, "data", scramble(m[0].weight)),
    "new parameter": lambda m: setattr(m[0], "weight", nn.Parameter(scramble(m[0].weight))),
}
UNTOLD: dict[
    str, Callable[[Any], object]
] = {  # which nothing but the bits shows; of the columns, every row keeps its sum
    "through data": lambda m: m[0].weight.data.copy_(scramble(m[0].weight)),
    "columns through data": lambda m: m[0].weight.data.copy_(m[0].weight.detach().flip(1).clone()),
    "one bit through data": lambda m: m[0].weight.data.view(torch.int32)[3, 5].bitwise_xor_(1 << 22),
    "through an alias from before": lambda m: m.alias[7].neg_(),
    "through numpy": lambda m: operator.imul(m[0].weight.detach().numpy(), -1),
}


@pytest.mark.parametrize("call", ["model", "layers"])
@pytest.mark.parametrize(
    ("change", "check"), [*((name, True) for name in CHANGES | UNTOLD), *((name, False) for name in CHANGES)]
)
def test_every_change_of_a_weight_is_noticed(change: str, check: bool, call: str) -> None:
    """Oracle: the run without the scope. `layers`: the model's own forward, and so its hook, is bypassed.

    Without the check of the bits, what tensor, address, version and optimizer tell.
    """
    outputs = []
    for cached in (False, True):
        model = model_of("tensorwise")
        model.alias = model[0].weight.data
        run = model if call == "model" else lambda x, model=model: model[2](model[1](model[0](x)))
        first, second = batches(2)
        with microbatches(model, check) if cached else torch.enable_grad():
            before = run(first)
            before.square().mean().backward()
            (CHANGES | UNTOLD)[change](model)
            model.zero_grad()
            after = run(second)
            after.square().mean().backward()
        outputs.append([before, after, *(p.grad for p in model.parameters())])
        torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    unchanged = model_of("tensorwise")(second)
    assert not torch.equal(outputs[0][1], unchanged)  # the change is one that matters


def test_scopes_end_cleanly_and_do_not_nest() -> None:
    model = model_of("tensorwise")
    nested = microbatches(model[0])
    with microbatches(model), pytest.raises(RuntimeError, match="already inside of a microbatches block"):
        nested.__enter__()
    with pytest.raises(KeyError), microbatches(model):
        raise KeyError
    with pytest.raises(TypeError, match=r"model is a list; expected Module; microbatches\(model\)"):
        microbatches([model]).__enter__()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_tied_weight_is_cast_once_for_each_layer_that_holds_it() -> None:
    """Oracle: the run without the scope; two layers share one parameter."""
    grads = []
    for cached in (False, True):
        torch.manual_seed(0)
        first, second = Float8Linear(32, 32), Float8Linear(32, 32)
        second.weight = first.weight
        model = nn.Sequential(first, second)
        with microbatches(model) if cached else torch.enable_grad():
            for x in batches(2):
                model(x).square().mean().backward()
        grads.append(first.weight.grad)
    assert torch.equal(*grads)
