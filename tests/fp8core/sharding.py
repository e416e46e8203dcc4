"""What the tests of FSDP2 run in each rank: one small model trained in many settings, with and without FP8 all-gather."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fp8core import (
    RECIPES,
    PrecisionSchedule,
    Recipe,
    convert_to_float8_training,
    microbatches,
    update_scales,
)
from fp8core.proof.wire import Collectives, count_collectives

TOKENS = 16
MICROBATCHES = 3


@dataclass(frozen=True)
class Setting:
    """One way to train. `placement`: dimension that is sharded; `replicas`: of a 2-D mesh; `at`: see `PrecisionSchedule`."""

    recipe: str = "tensorwise"
    sizes: tuple[int, ...] = (64, 128, 64)
    bias: bool = False
    dtype: str = "float32"
    param_dtype: str | None = None
    reshard: bool | int = True
    recompute: bool = False
    micro: int = 1
    keep_casts: bool = False
    clip: float | None = None
    offload: bool = False
    replicas: int = 1
    tied: bool = False
    compiled: bool = False
    meta: bool = False
    placement: int = 0
    kernels: Any = "auto"
    emulate: bool = True
    fused: bool = False
    schedule: str = ""
    steps: int = 2


@dataclass
class Trained:
    """What came of it. `gradients`: of the whole parameters, of each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    counts: list[Collectives] = field(default_factory=list)

    def differs_from(self, other: Trained) -> list[str]:
        """Where two runs are not the same bits."""
        found = []
        if self.losses != other.losses:
            found.append(f"losses {self.losses} and {other.losses}")
        for name in ("gradients", "weights"):
            pairs = list(zip(getattr(self, name), getattr(other, name), strict=True))
            wrong = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
            if wrong or not pairs:
                found.append(f"{name} {wrong} of {len(pairs)}")
        return found

    @property
    def gathered(self) -> Counter[str]:
        """Bytes of all-gathers by dtype."""
        return sum((Counter(each.of("all_gather")) for each in self.counts), Counter())

    @property
    def scale_reductions(self) -> list[int]:
        return [each.scale_reductions for each in self.counts]


class Stack(nn.Module):
    """Linear layers, each followed by a tanh; each may be recomputed."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        pairs = zip(setting.sizes, setting.sizes[1:], strict=False)
        dtype = getattr(torch, setting.dtype)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=setting.bias, dtype=dtype) for i, o in pairs)
        self.recompute = setting.recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = y.tanh()
        return x


def recipe_of(setting: Setting) -> Recipe:
    recipe = RECIPES[setting.recipe].with_kernels(setting.kernels)
    return recipe.emulated() if setting.emulate else recipe


def built(setting: Setting, fp8: bool) -> Stack:
    """Converted, not yet sharded."""
    torch.manual_seed(0)
    with torch.device("meta" if setting.meta else "cpu"):
        model = Stack(setting)
    if setting.tied:
        model.layers[-1].weight = model.layers[0].weight
    convert_to_float8_training(model, config=recipe_of(setting).with_fp8_all_gather(fp8))
    return model


def sharded(setting: Setting, fp8: bool) -> Stack:
    model = built(setting, fp8)
    world = dist.get_world_size()
    shape = (world,) if setting.replicas == 1 else (setting.replicas, world // setting.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(
        param_dtype=None if setting.param_dtype is None else getattr(torch, setting.param_dtype)
    )
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": setting.reshard,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if setting.offload else OffloadPolicy(),
    }
    if setting.placement:
        common["shard_placement_fn"] = lambda p: Shard(setting.placement) if p.dim() > 1 else None
    if setting.compiled:
        torch._dynamo.reset()  # layers share their class's code, and with it the limit of its recompiles
    for layer in [] if setting.tied else model.layers:
        if setting.compiled:
            layer.compile(fullgraph=True, backend="aot_eager")
        fully_shard(layer, **common)
    fully_shard(model, **common)
    if setting.meta:
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        for layer in model.layers:
            layer.reset_parameters()
    return model


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def train(setting: Setting, fp8: bool) -> Trained:
    """On data that differs by rank."""
    model = sharded(setting, fp8)
    fused = {"fused": True} if setting.fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **fused)
    schedule = PrecisionSchedule.parse(setting.schedule)
    result = Trained()
    for step in range(setting.steps):
        batches = batches_of(setting, step, dist.get_rank())
        with count_collectives() as counts:
            if setting.schedule:
                schedule.apply(model, step, setting.steps)
            with microbatches(model) if setting.keep_casts else warnings.catch_warnings():
                for index, x in enumerate(batches):
                    model.set_requires_gradient_sync(index == len(batches) - 1)
                    loss = model(x).float().square().mean()
                    loss.backward()
                    result.losses.append(loss.item())
            if setting.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        result.counts.append(counts)
        result.gradients += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
    result.weights = [whole(p) for p in model.parameters()]
    return result


def batches_of(setting: Setting, step: int, rank: int) -> torch.Tensor:
    """[micro, tokens, K] in the dtype that the model computes in."""
    data = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(setting.micro, TOKENS, setting.sizes[0], generator=data)
    return x.to(getattr(torch, setting.param_dtype or setting.dtype))


def alone(setting: Setting, world: int) -> list[torch.Tensor]:
    """Gradients of the first step of one process that sees the data of all ranks, batch by batch.

    Divided at the end, as FSDP2 does: a loss divided by 3 would have gradients of other codes.
    """
    model = built(replace(setting, recompute=False), fp8=False)
    for rank in range(world):
        for x in batches_of(setting, 0, rank):
            model(x).float().square().mean().backward()
    return [p.grad / world for p in model.parameters() if p.grad is not None]


def gathered_codes(kept: bool) -> tuple[list[float], float, dict[str, int]]:
    """Losses, the sum of the gradients, and bytes of all-gathers by dtype; `kept`: weights stay until the last backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    convert_to_float8_training(model, config=RECIPES["tensorwise"].with_fp8_all_gather())
    for layer in (*model, model):
        fully_shard(layer)
    if kept:
        model.set_reshard_after_forward(False)
    losses = []
    with count_collectives() as counts:
        for index in range(MICROBATCHES):
            last = index == MICROBATCHES - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not kept)
            loss = model(torch.full((16, 64), index + 1.0)).square().mean()
            loss.backward()
            losses.append(loss.item())
    total = sum(float(p.grad.to_local().double().sum()) for p in model.parameters())
    return losses, total, counts.of("all_gather")
