"""Scales of sharded weights: when they are found, by whom, and what is said of them; that they are right is in test_fsdp.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sharding
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from sharding import Setting, whole
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8core import (
    RECIPES,
    Float8LinearConfig,
    Float8Tensor,
    audit,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    verify,
)
from fp8core.distributed.weight_scales import known_of
from fp8core.proof.wire import count_collectives

UNEVEN = (48, 50, 7, 33)


def _in_place(model: sharding.Stack) -> None:
    with torch.no_grad():
        model.layers[1].weight.mul_(3)


def _loaded(model: sharding.Stack) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _through_state_dict(model: sharding.Stack) -> None:
    for value in model.state_dict().values():
        value.to_local().mul_(2)


def _stepped(model: sharding.Stack) -> None:
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def _stepped_elsewhere(model: sharding.Stack) -> None:
    if dist.get_rank() == 0:
        torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0).step()


def _precomputed(model: sharding.Stack) -> None:
    for p in model.parameters():
        p.data.to_local().mul_(2)
    precompute_float8_dynamic_scale_for_fsdp(model)


def _nothing(model: sharding.Stack) -> None:
    pass


CHANGES: dict[str, tuple[Callable[[sharding.Stack], None], int]] = {
    "an optimizer": (_stepped, 1),
    "an optimizer of other things, on one rank": (_stepped_elsewhere, 0),
    "an update in place": (_in_place, 1),
    "a state dict": (_loaded, 1),
    "a write through the state dict": (_through_state_dict, 1),
    "a write through data, and precompute": (_precomputed, 0),
    "nothing": (_nothing, 0),
}


@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
@on_ranks(2)
def test_scales_are_found_anew_after_each_change_and_only_then(world: int) -> None:
    """On all ranks at once, or this would hang; 8 ranks share 7 rows."""
    for name, (change, calls) in CHANGES.items():
        setting = Setting(sizes=UNEVEN)
        model = sharding.sharded(setting, fp8=True)
        x = sharding.batches_of(setting, 0, dist.get_rank())[0]
        model(x).square().mean().backward()
        change(model)
        with count_collectives() as counts:
            model(x).square().mean().backward()
        assert counts.scale_reductions == calls, name
        for layer in model.layers:
            assert torch.equal(known_of(layer).amax, whole(layer.weight).abs().amax()), name


@on_ranks(2)
def test_optimizers_in_the_backward_pass_cost_one_all_reduce_a_step() -> None:
    """Scales of other weights hold meanwhile; the same losses as without FP8 all-gather."""
    losses: list[float] = []
    for fp8 in (False, True):
        setting = Setting(sizes=UNEVEN)
        model = sharding.sharded(setting, fp8)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            parameter.register_post_accumulate_grad_hook(
                lambda p, own=optimizer: (own.step(), own.zero_grad())
            )
        for step in range(3):
            with count_collectives() as counts:
                loss = model(sharding.batches_of(setting, step, dist.get_rank())[0]).square().mean()
                loss.backward()
            losses.append(loss.item())
            assert counts.scale_reductions == fp8
    assert losses[:3] == losses[3:]


@on_ranks(2)
def test_evaluation_in_inference_mode_leaves_no_trace() -> None:
    """Oracle: outputs between steps and the gradients after them without FP8 all-gather."""
    found: list[list[torch.Tensor]] = []
    for fp8 in (False, True):
        setting = Setting(reshard=False)
        model = sharding.sharded(setting, fp8)
        x = sharding.batches_of(setting, 0, dist.get_rank())[0]
        model(x).square().mean().backward()
        with torch.inference_mode():
            output = model(x).clone()
        model(x).square().mean().backward()
        found.append([output, *(whole(p.grad) for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_ranks(2)
def test_nan_on_one_rank_is_nan_on_all() -> None:
    """Oracle: one process, where a weight with one NaN or Inf becomes NaN everywhere."""
    for recipe in ("tensorwise", "delayed"):
        for value in (torch.nan, -torch.nan, torch.inf):
            model = sharding.sharded(Setting(recipe, sizes=(32, 64, 32)), fp8=True)
            layer: Any = model.layers[0]
            if dist.get_rank() == 1:
                with torch.no_grad():
                    layer.weight.to_local()[-1, 5] = value
            assert model(torch.randn(16, 32)).isnan().all()
            layer.unshard()
            assert isinstance(layer.weight, Float8Tensor)
            assert layer.weight.dequantize().isnan().all()
            layer.reshard()


@on_ranks(4)
def test_replicas_do_not_ask_each_other() -> None:
    """Two weights, four bytes each, among the two ranks of a shard."""
    model = sharding.sharded(Setting(replicas=2), fp8=True)
    with count_collectives() as counts:
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert (counts.scale_reductions, counts.bytes["all_reduce", "int32"]) == (1, 8)


@on_ranks(4)
def test_mistakes_are_named_with_the_way_out() -> None:
    part: Any = sharding.sharded(Setting(reshard=2), fp8=True)
    plain = fully_shard(nn.Sequential(nn.Linear(32, 32)))
    switched: Any = sharding.sharded(Setting(), fp8=True)
    switched(torch.randn(16, 64)).sum().backward()
    for layer in switched.layers:
        layer.recipe = RECIPES["rowwise"].emulated().with_fp8_all_gather()
    mistakes: tuple[tuple[str, Callable[[], object]], ...] = (
        ("reshard_after_forward=2", lambda: part(torch.randn(16, 64))),
        ("convert, then fully_shard", lambda: convert_to_float8_training(plain)),
        ("PrecisionSchedule", lambda: switched(torch.randn(16, 64))),
    )
    for said, mistake in mistakes:
        with pytest.raises((ValueError, RuntimeError), match=said):
            mistake()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_verify_says_how_each_weight_is_gathered(recipe: str) -> None:
    model = sharding.sharded(Setting(recipe, emulate=False), fp8=True)
    x = torch.randn(16, 64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    proof = verify(step, model, fp8_all_gather=True, announce=False)
    in_fp8 = recipe == "tensorwise"
    assert proof.ok == in_fp8, proof.line
    assert bool(proof.warnings) != in_fp8
    assert list(proof.all_gathers) == ["uint8" if in_fp8 else "float32"]
    assert [layer.all_gather == "fp8" for layer in proof.layers] == [in_fp8] * 2


def test_audit_says_how_each_weight_is_gathered() -> None:
    """Without any process group: before anything is sharded."""
    model = nn.ModuleDict({"embed": nn.Embedding(32, 16), "head": nn.Linear(16, 32), "up": nn.Linear(16, 64)})
    model["head"].weight = model["embed"].weight
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    found = {layer.fqn: layer.all_gather for layer in audit(model).layers}
    assert found == {
        "head": "high precision: its weight is shared with embed, which can't read codes",
        "up": "fp8",
    }
    assert "; all-gather: fp8" in str(audit(model))
    assert model["head"].weight is model["embed"].weight
    precompute_float8_dynamic_scale_for_fsdp(model)  # nothing is sharded: nothing to do
