"""Plans of tensor parallelism by name, a step of a model under one, and how far two steps are apart."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parallel_models import Config, gradients, mlp, relative
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from fp8core import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    check_plan,
    update_scales,
)

Shape = tuple[int, int, bool]  # dim, hidden, bias
TOKENS = (2, 32)  # batch, sequence


def plan(style: str) -> dict[str, ParallelStyle]:
    """A plan by name; "sp": each rank holds some tokens of input and output."""
    inner = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plans: dict[str, dict[str, ParallelStyle]] = {
        "torch": {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
        "torch sp": {
            "": PrepareModuleInput(**inner),
            "gate": ColwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
        "float8": {
            "gate": Float8ColwiseParallel(),
            "up": Float8ColwiseParallel(),
            "down": Float8RowwiseParallel(),
        },
        "float8 sp": {
            "gate": Float8ColwiseParallel(input_layouts=Shard(1)),
            "up": Float8ColwiseParallel(input_layouts=Shard(1)),
            "down": Float8RowwiseParallel(output_layouts=Shard(1)),
        },
        "float8 sp shared": {
            "": PrepareFloat8ModuleInput(**inner),
            "gate": Float8ColwiseParallel(),
            "up": Float8ColwiseParallel(),
            "down": Float8RowwiseParallel(output_layouts=Shard(1)),
        },
    }
    return plans[style]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def data(dim: int, step: int = 0, spread: float = 1.0) -> torch.Tensor:
    """[*TOKENS, dim]; the larger `spread`, the more the features' magnitudes differ."""
    generator = torch.Generator().manual_seed(1 + step)
    x = torch.randn(*TOKENS, dim, generator=generator)
    return x * torch.exp(torch.randn(dim, generator=generator) * (spread - 1))


def trained(
    model: nn.Module, steps: int, style: str, dim: int, spread: float = 1.0
) -> dict[str, torch.Tensor]:
    """Output, gradients of input and of parameters of the last step; the earlier ones move delayed scales on."""
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        model.zero_grad()
        found = passes(model, data(dim, step, spread), style)
        update_scales(model)
    return found | gradients(model)


def passes(model: nn.Module, x: torch.Tensor, style: str) -> dict[str, torch.Tensor]:
    """One forward and one backward pass: output and gradient of the input, of this rank's tokens if the style cuts them."""
    x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if "sp" in style else x
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float().square().sum() / TOKENS[0] / TOKENS[1]).backward()
    assert x.grad is not None
    return {"output": y.detach(), "input": x.grad}


def parallel(config: Config, style: str, shape: Shape) -> nn.Module:
    dim, hidden, bias = shape
    model, tp = mlp(config, bias, dim, hidden), mesh()
    check_plan(model, tp, plan(style))
    return parallelize_module(model, tp, plan(style))


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], style: str) -> dict[str, float]:
    """Relative, of everything; output and input gradient are compared in this rank's part, where the plan cuts them."""
    found = {}
    for name, value in want.items():
        ours = got[name]
        if "sp" in style and name in ("output", "input"):
            value, ours = (of_this_rank(t) for t in (value, ours))
        found[name] = relative(ours, value)
    return found


def of_this_rank(x: torch.Tensor) -> torch.Tensor:
    """Its tokens, if x holds them all."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if x.shape[1] == TOKENS[1] else x
