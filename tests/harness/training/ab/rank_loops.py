"""What the ranks of `test_trial_ranks.py` run; each returns what the trial says on its rank."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from loops import Loop, planted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8core import Float8LinearConfig, PrecisionSchedule, convert_to_float8_training
from harness import ab

STEPS = 52  # three rounds


def answer_of(trial: Any) -> dict[str, Any]:
    result = trial.result()
    return {
        "speedup": result.effect.speedup if result.rounds else None,
        "base_ms": result.median_ms("base"),
        "rounds": len(result.rounds),
        "faults": [dict(r.faults) for r in result.rounds],
        "proved": result.proved,
        "proof": result.proof,
        "doubt": result.doubt,
        "problem": result.problem,
        "slow_rank": result.slow_rank,
        "text": "\n".join(result.lines()),
        "done": trial.done,
        "order": [trial.plan.order(i) for i in range(3)],
    }


def data_parallel(slower: float = 1.0) -> dict[str, Any]:
    """DDP around a model that the trial converted before; rank 1's steps take `slower` times as long."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS)
    factor = slower if dist.get_rank() else 1.0
    planted(trial, 80.0 * factor, 100.0 * factor)
    loop.model = DistributedDataParallel(loop.model)
    loop.turn = 1000 * dist.get_rank()  # other batches
    loop.run(trial, loop.turn + STEPS)
    return answer_of(trial)


def sharded(recipe: str, fp8_all_gather: bool, demand: bool) -> dict[str, Any]:
    """FSDP2 over both ranks."""
    loop = Loop(seed=0)
    config = (
        Float8LinearConfig(enable_fsdp_float8_all_gather=fp8_all_gather)
        if recipe == "tensorwise"
        else Float8LinearConfig.from_recipe_name(recipe)
    )
    convert_to_float8_training(loop.model, config=config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (loop.model.up, loop.model.down, loop.model):
        fully_shard(layer, mesh=mesh)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 10, 0.9)
    trial = ab.Trial(loop.model, recipe, steps=STEPS, fp8_all_gather=demand)
    planted(trial)
    loop.turn = 1000 * dist.get_rank()
    loop.run(trial, loop.turn + STEPS)
    return answer_of(trial)


def left_in_bf16(when: str) -> dict[str, Any]:
    """Something on rank 1 holds the model in bf16: from the start, or within a later block."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS)
    planted(trial)
    held = PrecisionSchedule.parse("keep_bf16")
    while not trial.done and loop.turn < STEPS:
        with trial.step():
            if dist.get_rank() == 1 and (when == "always" or loop.turn >= 40):
                held.apply(loop.model, 0, 1)
            loop.step()
    return answer_of(trial)


def stops_early() -> dict[str, Any]:
    """Rank 1 leaves the loop in the first round."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS, rank_timeout_s=2.0)
    loop.run(trial, 12 if dist.get_rank() == 1 else STEPS)
    return answer_of(trial)


def other_shapes() -> dict[str, Any]:
    """Rank 1 meets a shorter batch within a block."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS)
    planted(trial)
    while not trial.done and loop.turn < STEPS:
        if dist.get_rank() == 1:
            loop.rows = 8 if loop.turn == 20 else 16
        with trial.step():
            loop.step()
    return answer_of(trial)


def raises() -> dict[str, Any]:
    """Rank 1 raises within a step, catches it and leaves."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS, rank_timeout_s=20.0)
    with contextlib.suppress(ZeroDivisionError):
        while not trial.done and loop.turn < STEPS:
            with trial.step():
                if dist.get_rank() == 1 and loop.turn == 20:
                    raise ZeroDivisionError("planted")
                loop.step()
    return answer_of(trial)


def reports_early() -> dict[str, Any]:
    """Rank 0 prints a report in the middle."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS)
    planted(trial)
    loop.run(trial, 30)
    told = trial.report() if dist.get_rank() == 0 else "under way"
    early = trial.done
    loop.run(trial)
    return {**answer_of(trial), "told": told, "early": early}


def made_before_the_group() -> dict[str, Any]:
    """The trial is made while no process group can be seen; rank 1's steps take 1.2 times as long."""
    loop = Loop(seed=0)
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        trial = ab.Trial(loop.model, steps=STEPS)
    factor = 1.2 if dist.get_rank() else 1.0
    planted(trial, 80.0 * factor, 100.0 * factor)
    loop.model = DistributedDataParallel(loop.model)
    loop.turn = 1000 * dist.get_rank()
    loop.run(trial, loop.turn + STEPS)
    return answer_of(trial)


def converted_and_sharded(recipe: str) -> dict[str, Any]:
    """The trial converts for FP8 all-gather; then FSDP2."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, recipe, steps=STEPS, fp8_all_gather=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (loop.model.up, loop.model.down, loop.model):
        fully_shard(layer, mesh=mesh)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 10, 0.9)
    planted(trial)
    loop.run(trial, STEPS)
    return answer_of(trial)
