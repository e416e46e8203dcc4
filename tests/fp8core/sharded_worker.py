"""Models that FSDP2 shards on two ranks; what `test_sharded.py` judges."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8core import RECIPES, Float8Linear, convert_to_float8_training, microbatches, update_scales, verify

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))


def sharded(name: str, kernels: Any, reshard: bool) -> nn.Module:
    model = convert_to_float8_training(plain_model(), config=RECIPES[name].with_kernels(kernels))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return model


def train(name: str, kernels: Any, reshard: bool, cached: bool) -> dict[str, Any]:
    """Losses of two optimizer steps of three microbatches, digests of the gradients, and uses of kept casts."""
    model = sharded(name, kernels, reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    batches = torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    losses, gradients, hits = [], [], 0
    for step in batches:
        with microbatches(model) if cached else nullcontext():
            for index, x in enumerate(step):
                last = index == len(step) - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(reshard or last)
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.item())
            layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
            hits += sum(layer.weight_cache.hits for layer in layers if layer.weight_cache is not None)
        gradients += [p.grad.to_local().double().sum().item() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
    return {"losses": losses, "gradients": gradients, "hits": hits}


def states() -> dict[str, Any]:
    """State dicts both ways between nn.Linear and sharded layers; values as the original's."""
    model, original = sharded("delayed", "auto", reshard=True), plain_model()
    own = model.state_dict()
    given = {key: value + 1 for key, value in original.state_dict().items()}
    found = {}
    for name, wanted in (("same", original.state_dict()), ("loaded", given)):
        if name == "loaded":
            whole = {key: value.clone() for key, value in given.items()}
            set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, strict=False))
        full = get_model_state_dict(model, options=WHOLE)
        if dist.get_rank() == 0:  # which holds the full state
            back = plain_model()
            back.load_state_dict({key: value for key, value in full.items() if "amaxes" not in key})
            found[name] = [torch.equal(back.state_dict()[key], value) for key, value in wanted.items()]
    return found | {
        "kinds": {type(t.to_local() if isinstance(t, DTensor) else t) for t in own.values()},
        "keys": sorted(own),
    }


def proof() -> dict[str, Any]:
    model = sharded("rowwise", "auto", reshard=True)
    x = torch.randn(16, 32, requires_grad=True)
    found = verify(lambda: model(x).square().mean().backward(), model, announce=False)
    wanted = verify(lambda: model(x).square().mean().backward(), model, fp8_all_gather=True, announce=False)
    return {"ok": found.ok, "problems": found.problems, "gathered": found.all_gathers, "fp8": wanted.problems}


def everything() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    runs = {
        f"{name} {kernels} {reshard}": [train(name, kernels, reshard, cached) for cached in (False, True)]
        for name, kernels in (("tensorwise", "auto"), ("rowwise", "always"), ("delayed", "always"))
        for reshard in (True, False)
    }
    return {"runs": runs, "states": states(), "proof": proof()}
