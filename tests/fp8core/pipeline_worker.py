"""Stages of blocks and their references, for `test_pipeline.py` and `test_three_dimensions.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import blocks, gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import mse_loss

from fp8core import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    Recipe,
    check_plan,
    update_scales,
)
from fp8core.history import AmaxMemory

DIM, TOKENS, MICROBATCHES = 32, 16, 4
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
PLAN: dict[str, Any] = {
    "*.mlp.gate": Float8ColwiseParallel,
    "*.mlp.up": Float8ColwiseParallel,
    "*.mlp.down": Float8RowwiseParallel,
}


def batch(step: int, replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target [MICROBATCHES * 2, TOKENS, DIM]; the microbatches' magnitudes differ, so their amaxes do."""
    generator = torch.Generator().manual_seed(100 + 10 * step + replica)
    shape = (MICROBATCHES * 2, TOKENS, DIM)
    grow = torch.arange(1.0, MICROBATCHES + 1).repeat_interleave(2)[:, None, None]
    return torch.randn(shape, generator=generator) * grow, torch.randn(shape, generator=generator)


@cache
def one_process(
    recipe: Recipe, count: int, steps: int, *, replicas: int = 1, microbatches: int = MICROBATCHES
) -> dict[str, Any]:
    """Losses [step][replica][microbatch], and the last step's gradients, of the model that no one has cut."""
    model = blocks(count, recipe)
    losses: list[list[list[float]]] = []
    for step in range(steps):
        model.zero_grad()
        losses.append([])
        for replica in range(replicas):
            x, target = batch(step, replica)
            parts = zip(x.chunk(microbatches), target.chunk(microbatches), strict=True)
            found = []
            for part, wanted in parts:
                loss = mse_loss(model(part), wanted)
                (loss / microbatches / replicas).backward()
                found.append(loss.item())
            losses[-1].append(found)
        update_scales(model, alone())
    return {"losses": losses, "gradients": gradients(model), "amaxes": amaxes(model)}


def alone() -> dist.ProcessGroup:
    """This rank only, for a reference that each rank computes; called by all ranks together."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def amaxes(model: nn.Module) -> list[list[float]]:
    """In use, a row a layer; none for dynamic recipes."""
    return [m.in_use.tolist() for m in model.modules() if isinstance(m, AmaxMemory)]


def own_blocks(recipe: Recipe, count: int, stage: int, stages: int) -> nn.Sequential:
    """A stage's share, under the names of the whole model."""
    model = blocks(count, recipe)
    per = count // stages
    kept = nn.Sequential()
    for index in range(stage * per, (stage + 1) * per):
        kept.add_module(str(index), model[index])
    return kept


def stage_of(
    model: nn.Module, index: int, stages: int, group: dist.ProcessGroup | None = None
) -> PipelineStage:
    """With shapes given: torch would find them by passes over uninitialised memory, whose amaxes delayed scaling would
    remember."""
    given = torch.empty(2, TOKENS, DIM, device="meta", requires_grad=index > 0)
    made = torch.empty(2, TOKENS, DIM, device="meta", requires_grad=True)
    cpu = torch.device("cpu")
    return PipelineStage(model, index, stages, cpu, input_args=given, output_args=made, group=group)


def scheduled(
    schedule: str, stage: PipelineStage, model: nn.Module, steps: int, replica: int, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Trains for some steps; losses of the microbatches, on the last stage."""
    run = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=mse_loss)
    losses: list[list[float]] = []
    for step in range(steps):
        model.zero_grad()
        x, target = batch(step, replica)
        found: list[torch.Tensor] = []
        if stage.is_last:
            run.step(*((x,) if stage.is_first else ()), target=target, losses=found)
        else:
            run.step(*((x,) if stage.is_first else ()))
        losses.append([loss.item() for loss in found])
        update_scales(model, group)
    return {"losses": losses, "gradients": gradients(model), "amaxes": amaxes(model)}


def own_amaxes(want: dict[str, Any], stage: PipelineStage) -> list[list[float]]:
    """Those of the stage's layers."""
    per = len(want["amaxes"]) // stage.num_stages
    return want["amaxes"][stage.stage_index * per : (stage.stage_index + 1) * per]


def cut_and_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {name: style() for name, style in PLAN.items()}
    check_plan(model, mesh["tp"], plan)
    parallelize_module(model, mesh["tp"], plan)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
