"""Oracles: a training loop written out by hand (bitwise), nanoGPT's decay groups, torchao's own conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import tiny_lm, tokens
from torch import Tensor, nn

from fp8core.convert import convert_to_float8_training
from fp8core.history import update_scales
from fp8core.linear import Float8Linear
from fp8core.recipe import RECIPES
from harness.peers import PEERS, torchao
from harness.store.errors import UsageError
from harness.training.setup import (
    Setup,
    Trainee,
    mixed_precision,
    prepare,
    replace_layers,
)

needs_torchao = pytest.mark.skipif(torchao.missing("cpu") is not None, reason=str(torchao.missing("cpu")))


def setup(**changes: Any) -> Setup:
    return Setup(**({"model": "tiny", "batch": 4, "seq": 8, "compute": "fp32"} | changes))


def trainee(model: nn.Module | None = None, **changes: Any) -> Trainee:
    made = setup(**changes)
    return prepare(made, "cpu", model if model is not None else tiny_lm(made.weight_dtype))


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# train.mixed_precision


@pytest.mark.parametrize(
    "text", ["", " fp8", "fp8 ", "fp-8", "8", "fp16", "bf8", "e4m3", "none", "fp8,bf16", True, None, 8]
)
def test_mixed_precision_never_guesses(text: Any) -> None:
    with pytest.raises(
        UsageError, match=r"unknown train\.mixed_precision .*known: bf16, bfloat16, float8, fp8"
    ):
        mixed_precision(text)
    for word in ("bf16", "fp8"):  # also where no recipe is used
        with pytest.raises(UsageError, match=r"unknown train\.recipe 'rowise' \(nearest: rowwise\)"):
            mixed_precision(word, "rowise")


# The step


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_equal_a_loop_written_by_hand(recipe: str | None, accumulation: int) -> None:
    """Bitwise, over three steps: losses, gradient norms and weights."""
    made = trainee(recipe=RECIPES[recipe] if recipe else None, accumulation=accumulation, grad_clip=0.5)
    model = tiny_lm()
    if recipe:
        model = convert_to_float8_training(model, config=recipe)
    weights = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=6e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(3):
        batches = [tokens(step * accumulation + i) for i in range(accumulation)]
        loss = made.step(batches)
        losses = []
        for batch in batches:
            one = model(*batch)
            (one / accumulation).backward()
            losses.append(one.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if recipe:
            update_scales(model)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, torch.stack(losses).mean())
        assert made.grad_norm is not None
        assert torch.equal(made.grad_norm, norm)
        assert same(parameters(made.model), parameters(model))
    if recipe == "delayed":
        counts = [m.amaxes.updates for m in made.model.modules() if isinstance(m, Float8Linear) and m.amaxes]
        assert counts == [3, 3]


# What computes in what


# Compiled


# Peers


def linears(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {fqn for fqn, m in model.named_modules() if isinstance(m, kind)}


@needs_torchao
@pytest.mark.parametrize("recipe", torchao.PEER.recipes)
def test_torchao_takes_the_layers_that_fp8core_converts(recipe: str) -> None:
    """Its own conversion, filtered to sizes that are multiples of 16, chooses the same; parameters stay the same."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs
    from torchao.float8.float8_linear_utils import swap_linear_layers

    model = tiny_lm()
    before = {name: id(p) for name, p in model.named_parameters()}
    made = trainee(model, recipe=RECIPES[recipe], peer="torchao")
    config = Float8LinearConfig.from_recipe_name(recipe)
    own = swap_linear_layers(
        tiny_lm(),
        lambda m: Theirs.from_float(m, config=config),
        module_filter_fn=lambda m, fqn: m.in_features % 16 == 0 and m.out_features % 16 == 0,
    )
    assert linears(made.model, Theirs) == linears(own, Theirs) == {f.fqn for f in made.audit.converted}
    assert not linears(made.model, Float8Linear)
    assert {name: id(p) for name, p in made.model.named_parameters()} == before
    assert float(made.step([tokens(0)])) == pytest.approx(float(own(*tokens(0)).detach()), rel=1e-6)


@needs_torchao
def test_a_layer_in_two_places_stays_one() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), config="tensorwise")
    model.append(model[0])
    linear = PEERS["torchao"].linear
    assert linear is not None
    replaced = replace_layers(model, lambda layer: linear(layer, "tensorwise"))
    assert replaced[0] is replaced[2]


# Bad input


@pytest.mark.parametrize(("experts", "stacked"), [("hp", 0), ("fp8", 6)])
def test_the_weights_in_fp8_are_those_of_layers_and_experts_that_were_converted(
    experts: str, stacked: int
) -> None:
    """Oracle: two blocks with q, k, v and output, three stacked weights each, and a head; the router stays as it is."""
    made = prepare(
        Setup("llama_moe_tiny", 2, 16, compute="fp32", recipe=RECIPES["rowwise"], experts=experts), "cpu"
    )
    weights = made.fp8_weights()
    assert [w.dim() for w in weights] == [2] * 9 + [3] * stacked
    assert len({id(w) for w in weights}) == len(weights)
    assert all(any(w is p for p in made.model.parameters()) for w in weights)
    assert trainee().fp8_weights() == []
