"""microbatch: results of the uncached run bit for bit, and every way in which a weight can change is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from recipes import on_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8core import RECIPES, Float8Linear, convert_to_float8_training, microbatches


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    return convert_to_float8_training(model, config=on_cpu(name))


def batches(n: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(n, 16, 32, generator=torch.Generator().manual_seed(1)))


def uses(model: nn.Module) -> list[tuple[int, int]]:
    """Casts that each layer keeps, and how often they were made."""
    return [
        (m.weight_cache.hits, m.weight_cache.misses) for m in model.modules() if isinstance(m, Float8Linear)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_equal_those_without_and_weights_are_cast_once(name: str) -> None:
    """Oracle: the same microbatches outside of the scope; casts are counted."""
    runs = []
    for cached in (False, True):
        model = model_of(name)
        losses = []
        with microbatches(model) if cached else torch.enable_grad():
            for x in batches():
                loss = model(x.requires_grad_()).square().mean()
                loss.backward()
                losses.append(loss.detach())
            if cached:
                assert uses(model) == [(3, 1)] * 2
        runs.append([*losses, *(p.grad for p in model.parameters())])
        assert all(m.weight_cache is None for m in model.modules() if isinstance(m, Float8Linear))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def scramble(weight: torch.Tensor) -> torch.Tensor:
    """Other values in the same shape, with the same sum."""
    return weight.detach().flip(0).clone()


def optimizer_step(kind: type[torch.optim.Optimizer], **options: bool) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        kind(model.parameters(), lr=0.1, **options).step()

    return change


def load(assign: bool) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        state = {
            key: scramble(value) if value.dim() > 1 else value for key, value in model.state_dict().items()
        }
        model.load_state_dict(state, assign=assign)

    return change


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def through_data(model: nn.Module) -> None:
    model[0].weight.data.copy_(scramble(model[0].weight))


def columns_through_data(model: nn.Module) -> None:
    """Every row keeps its sum."""
    model[0].weight.data.copy_(model[0].weight.detach().flip(1).clone())


def one_bit_through_data(model: nn.Module) -> None:
    model[0].weight.data.view(torch.int32)[3, 5] ^= 1 << 22


def through_an_old_alias(model: nn.Module, alias: dict[str, torch.Tensor] | None = None) -> None:
    model.alias[7].neg_()


def through_numpy(model: nn.Module) -> None:
    model[0].weight.detach().numpy()[:] *= -1


def new_data(model: nn.Module) -> None:
    model[0].weight.data = scramble(model[0].weight)


def new_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(scramble(model[0].weight))


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "AdamW foreach": optimizer_step(torch.optim.AdamW, foreach=True),
    "AdamW fused": optimizer_step(torch.optim.AdamW, fused=True),
    "AdamW loop": optimizer_step(torch.optim.AdamW, foreach=False),
    "SGD fused": optimizer_step(torch.optim.SGD, fused=True),
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "in place": in_place,
    "through data": through_data,
    "columns through data": columns_through_data,
    "one bit through data": one_bit_through_data,
    "through an alias from before": through_an_old_alias,
    "through numpy": through_numpy,
    "new data": new_data,
    "new parameter": new_parameter,
}


UNTOLD = (through_data, columns_through_data, one_bit_through_data, through_an_old_alias, through_numpy)


@pytest.mark.parametrize("call", ["model", "layers"])
@pytest.mark.parametrize(
    ("change", "check"),
    [(name, True) for name in CHANGES] + [(n, False) for n, c in CHANGES.items() if c not in UNTOLD],
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
            CHANGES[change](model)
            model.zero_grad()
            after = run(second)
            after.square().mean().backward()
        outputs.append([before, after, *(p.grad for p in model.parameters())])
        torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    unchanged = model_of("tensorwise")(second)
    assert not torch.equal(outputs[0][1], unchanged)  # the change is one that matters


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_uses_the_kept_casts(reentrant: bool) -> None:
    """Oracle: the gradients without checkpointing or scope."""
    grads = []
    for cached in (False, True):
        model = model_of("rowwise")
        with microbatches(model) if cached else torch.enable_grad():
            for x in batches(2):
                x.requires_grad_()
                y = checkpoint(model, x, use_reentrant=reentrant) if cached else model(x)
                y.square().mean().backward()
            if cached:
                assert uses(model) == [(3, 1)] * 2
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


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
    assert copy.deepcopy(model)[0].weight_cache is None


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
