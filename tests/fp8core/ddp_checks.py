"""What the tests of FP8 under DDP, and of torchao beside fp8core, run in each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import sharding
import torch
import torch.distributed as dist
from sharding import Setting
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8core import Float8Linear, convert_to_float8_training, update_scales

STEPS = 3


def ddp(settings: list[Setting]) -> list[dict[str, Any]]:
    """What `trained` finds in each setting under DDP."""
    warnings.simplefilter("ignore")
    return [trained(setting, [dist.get_rank()], DistributedDataParallel) for setting in settings]


def trained(
    setting: Setting, of_ranks: list[int], wrapped: Callable[[nn.Module], nn.Module] = lambda m: m
) -> dict[str, Any]:
    """Losses and averaged gradients of each step, and the amaxes in use at the end; one process takes the ranks' batches in turn."""
    inner = sharding.built(setting, fp8=False)
    model = wrapped(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for step in range(STEPS):
        for rank in of_ranks:
            (x,) = sharding.batches_of(setting, step, rank)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        grads = [p.grad.div_(len(of_ranks)) for p in model.parameters() if p.grad is not None]
        gradients.append([grad.tolist() for grad in grads])
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
    layers = [m for m in inner.modules() if isinstance(m, Float8Linear)]
    amaxes = [layer.amaxes.in_use.tolist() for layer in layers if layer.amaxes is not None]
    return {"losses": losses, "gradients": gradients, "amaxes": amaxes}


def accumulated() -> float:
    """Amax in use of the layer's input after a step of three microbatches.

    Each microbatch reduces gradients, so that DDP broadcasts buffers before each forward pass; the largest input, 64, is
    in the last rank's first microbatch.
    """
    torch.manual_seed(0)
    inner = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config="delayed")
    model = DistributedDataParallel(nn.Sequential(inner))
    for number in range(3):
        x = torch.full((16, 32), 64.0 if (number, dist.get_rank()) == (0, dist.get_world_size() - 1) else 1.0)
        model(x).square().mean().backward()
    update_scales(model)
    (layer,) = (m for m in inner.modules() if isinstance(m, Float8Linear))
    assert layer.amaxes is not None
    return float(layer.amaxes.in_use[0])
