"""What the ranks of `test_trial_ranks.py` run; each returns what the trial says on its rank."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from loops import Loop, equal, planted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8core import (
    RECIPES,
    Float8ColwiseParallel,
    Float8LinearConfig,
    Float8RowwiseParallel,
    PrecisionSchedule,
    convert_to_float8_training,
)
from harness import ab
from harness.store.printer import as_text

STEPS = 52  # three rounds


def answer_of(trial: Any, **more: Any) -> dict[str, Any]:
    """What is compared, and the result itself."""
    result = trial.result()
    return {
        "result": result,
        "faults": [dict(r.faults) for r in result.rounds],
        "text": as_text(result),
        "done": trial.done,
        "order": [trial.plan.order(i) for i in range(3)],
        **more,
    }


def begun(loop: Loop, **given: Any) -> Any:
    return planted(ab.Trial(loop.model, **({"steps": STEPS, "rank_timeout_s": 60.0} | given)))


def shard(loop: Loop) -> None:
    """FSDP2 over all ranks, each of which has other batches."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (loop.model.up, loop.model.down, loop.model):
        fully_shard(layer, mesh=mesh)
    loop.make_optimizer()
    loop.turn = 1000 * dist.get_rank()


def data_parallel(group_is_seen: bool) -> dict[str, Any]:
    """DDP around a model that the trial converted before; rank 1's steps take 1.2 times as long."""
    loop = Loop()
    unseen = mock.patch("torch.distributed.is_initialized", return_value=False)
    with contextlib.nullcontext() if group_is_seen else unseen:
        trial = ab.Trial(loop.model, steps=STEPS)
    planted(trial, 1.2 if dist.get_rank() else 1.0)
    loop.model = DistributedDataParallel(loop.model)
    loop.turn = 1000 * dist.get_rank()
    loop.run(trial)
    return answer_of(trial)


def sharded(recipe: str, fp8_all_gather: bool, demand: bool, by_trial: bool) -> dict[str, Any]:
    """FSDP2 of a model that the trial converts, or that is converted before it."""
    loop = Loop()
    if by_trial:
        trial = begun(loop, recipe=recipe, fp8_all_gather=demand)
        shard(loop)
    else:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=fp8_all_gather)
        convert_to_float8_training(loop.model, config=config if recipe == "tensorwise" else recipe)
        shard(loop)
        trial = begun(loop, recipe=recipe, fp8_all_gather=demand)
    loop.run(trial)
    return answer_of(trial)


def odd_rank(what: str) -> dict[str, Any]:
    """Rank 1 alone: holds the model in one precision, meets shorter batches, leaves, raises in a step or between, or closes."""
    loop, odd = Loop(), dist.get_rank() == 1
    trial = begun(loop, rank_timeout_s=2.0 if what == "stops" else 60.0)
    held = PrecisionSchedule.parse("" if what == "fp8" else "keep_bf16")

    def before() -> None:
        if odd and what == "rows":
            loop.rows = 32
        if odd and what == "shapes":
            loop.rows = 8 if loop.turn == 20 else 16
        if odd and loop.turn == 20 and what == "raises between":
            raise ZeroDivisionError("planted")
        if odd and loop.turn == 20 and what == "closes":
            trial.close()

    def inside() -> None:
        if odd and (what in ("bf16", "fp8") or (what == "bf16 later" and loop.turn >= 40)):
            held.apply(loop.model, 0, 1)
        if odd and loop.turn == 20 and what == "raises within":
            raise ZeroDivisionError("planted")

    began = time.monotonic()
    with contextlib.suppress(ZeroDivisionError), trial if "between" in what else contextlib.nullcontext():
        loop.run(trial, 12 if odd and what == "stops" else STEPS, before=before, inside=inside)
    return answer_of(trial, took_s=time.monotonic() - began)


def reports_early() -> dict[str, Any]:
    """Rank 0 prints a report in the middle."""
    loop = Loop()
    trial = begun(loop)
    loop.run(trial, 30)
    told = trial.report() if dist.get_rank() == 0 else "under way"
    early = trial.done
    loop.run(trial)
    return answer_of(trial, told=told, early=early)


def other_trial(what: str) -> dict[str, Any]:
    """Rank 1 is given another trial, or cannot begin; no collective joins the ranks."""
    loop, odd = Loop(), dist.get_rank() == 1
    given: dict[str, Any] = {"restore": []}
    if odd:
        given |= {"seed": {"seed": 1}, "restore": {"restore": [loop.optimizer]}}.get(what, {})
    if odd and what == "layers":
        given["after"] = "bf16"  # as rank 0's, which comes unconverted, is left
        convert_to_float8_training(loop.model, module_filter_fn=lambda module, fqn: fqn == "up")
    if what == "casts":  # of a recipe of the same name
        own = RECIPES["delayed"]
        given |= {"recipe": "delayed", "after": "bf16"}
        convert_to_float8_training(loop.model, config=replace(own, grad_input=own.output) if odd else own)
    trial = begun(loop, **given)
    broken = mock.patch("harness.training.ab.trial.Meter", side_effect=RuntimeError("planted"))
    raised = ""
    with broken if odd and what == "cannot begin" else contextlib.nullcontext():
        try:
            loop.run(trial, 1)
        except RuntimeError as error:
            raised = str(error)
    return answer_of(trial, raised=raised, turn=loop.turn, hooks=len(loop.model._forward_hooks))


def tensor_parallel() -> dict[str, Any]:
    """A SwiGLU whose layers are cut by fp8core's styles; both ranks train on the same batch."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)
            self.down = nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
            return y, (y - x).square().mean()

    loop = Loop()
    columns, down = Float8ColwiseParallel(), Float8RowwiseParallel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = convert_to_float8_training(Mlp())
    loop.model = parallelize_module(model, mesh, {"gate": columns, "up": columns, "down": down})
    loop.make_optimizer()
    trial = planted(ab.Trial(loop.model, steps=25, block=1, restore=[loop.optimizer]))
    loop.run(trial)
    return answer_of(trial)


def raises_within() -> dict[str, Any]:
    """All ranks raise in the middle of a backward pass; then training goes on."""
    loop, plain = Loop(), Loop()
    for each in (loop, plain):
        convert_to_float8_training(each.model)
        shard(each)
        each.turn = 0
    trial = ab.Trial(loop.model, steps=25, block=1, restore=[loop.optimizer, loop.scheduler], after="fp8")

    def raises(*_: Any) -> None:
        if loop.turn == 5:
            raise ZeroDivisionError("planted")

    hook = loop.model.up.register_full_backward_pre_hook(raises)
    with contextlib.suppress(ZeroDivisionError), trial:
        loop.run(trial)
    hook.remove()
    loop.turn = 0
    for _ in range(2):
        loop.step()
        plain.step()
    parts: list[list[Any]] = [[p.to_local() for p in each.model.parameters()] for each in (loop, plain)]
    return answer_of(trial, equal=equal(*parts))
