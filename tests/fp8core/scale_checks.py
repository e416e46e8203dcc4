"""What the tests of the scales of sharded weights run in each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import sharding
import torch
import torch.distributed as dist
from sharding import Setting, whole
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8core import (
    RECIPES,
    Float8Tensor,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    verify,
)
from fp8core.distributed.weight_scales import known_of
from fp8core.distributed.wire import count_collectives

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


def all_reduces_after_changes() -> dict[str, tuple[int, bool]]:
    """All-reduces of the forward pass after each change, and whether its weights have the right scales."""
    warnings.simplefilter("ignore")
    found = {}
    for name, (change, _) in CHANGES.items():
        setting = Setting(sizes=UNEVEN)
        model = sharding.sharded(setting, fp8=True)
        x = sharding.batches_of(setting, 0, dist.get_rank())[0]
        model(x).square().mean().backward()
        change(model)
        with count_collectives() as counts:
            model(x).square().mean().backward()
        right = [
            torch.equal(known.amax, whole(layer.weight).abs().amax())
            for layer in model.layers
            if (known := known_of(layer)) is not None and known.amax is not None
        ]
        found[name] = counts.scale_reductions, right == [True] * len(model.layers)
    return found


def odd_orders() -> dict[str, Any]:
    """Steps and passes in another order than the usual one."""
    warnings.simplefilter("ignore")
    return {
        "in the backward pass": optimizers_in_the_backward_pass(),
        "inference mode": evaluated_in_inference_mode(),
    }


def optimizers_in_the_backward_pass() -> tuple[list[int], bool]:
    """Scale all-reduces of each step where each weight is stepped once its gradient is there; the same losses as without."""
    reductions, losses = [], []
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
            reductions.append(counts.scale_reductions)
    return reductions, losses[:3] == losses[3:]


def evaluated_in_inference_mode() -> bool:
    """Whether outputs between steps and the gradients after them are those without FP8 all-gather."""
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
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def nan_on_one_rank(recipes: list[str]) -> list[bool]:
    """Whether each gathered weight and scale is NaN throughout on this rank."""
    warnings.simplefilter("ignore")
    found = []
    for recipe in recipes:
        for value in (torch.nan, -torch.nan, torch.inf):
            model = sharding.sharded(Setting(recipe, sizes=(32, 64, 32)), fp8=True)
            layer = model.layers[0]
            if dist.get_rank() == dist.get_world_size() - 1:
                with torch.no_grad():
                    layer.weight.to_local()[-1, 5] = value
            loss = model(torch.randn(16, 32)).square().mean()
            layer.unshard()
            weight = layer.weight
            assert isinstance(weight, Float8Tensor)
            found += [bool(weight.dequantize().isnan().all()), bool(loss.isnan())]
            layer.reshard()
    return found


def replicas_do_not_ask() -> list[int]:
    """Scale all-reduces, and the ranks of the group that took part."""
    warnings.simplefilter("ignore")
    model = sharding.sharded(Setting(replicas=2), fp8=True)
    with count_collectives() as counts:
        precompute_float8_dynamic_scale_for_fsdp(model)
    return [counts.scale_reductions, counts.bytes["all_reduce", "int32"]]


def refusals() -> dict[str, str]:
    """What is said to each mistake."""
    warnings.simplefilter("ignore")
    part: Any = sharding.sharded(Setting(reshard=2), fp8=True)
    plain = nn.Sequential(nn.Linear(32, 32))
    fully_shard(plain)
    switched: Any = sharding.sharded(Setting(), fp8=True)
    switched(torch.randn(16, 64)).sum().backward()
    for layer in switched.layers:
        layer.recipe = RECIPES["rowwise"].emulated().with_fp8_all_gather()
    found = {}
    for name, mistake in {
        "part of the ranks": lambda: part(torch.randn(16, 64)),
        "order": lambda: convert_to_float8_training(plain),
        "switched by hand": lambda: switched(torch.randn(16, 64)),
    }.items():
        try:
            mistake()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def proofs() -> dict[str, Any]:
    """`verify` of models that ask for FP8 all-gathers, and get them or not."""
    warnings.simplefilter("ignore")
    found = {}
    for recipe in ("tensorwise", "rowwise"):
        model = sharding.sharded(Setting(recipe, emulate=False), fp8=True)
        x = torch.randn(16, 64, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: Any = model, x: torch.Tensor = x, optimizer: Any = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()

        proof = verify(step, model, fp8_all_gather=True, announce=False)
        found[recipe] = {
            "ok": proof.ok,
            "line": proof.line,
            "warnings": proof.warnings,
            "gathered": proof.all_gathers,
            "layers": [layer.all_gather for layer in proof.layers],
        }
    return found
