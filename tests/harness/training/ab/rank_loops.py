"""What the ranks of `test_trial_ranks.py` run; each returns what the trial says on its rank."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from loops import Loop, PlantedClock, equal, planted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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
from fp8core.distributed.wire import count_collectives
from harness import ab
from harness.training.ab.plan import BASE, FP8, GATHER

STEPS = 52  # three rounds


def answer_of(trial: Any, **more: Any) -> dict[str, Any]:
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
        "restored": result.restored,
        "slow_rank": result.slow_rank,
        "text": "\n".join(result.lines()),
        "done": trial.done,
        "order": [trial.plan.order(i) for i in range(3)],
        **more,
    }


def begun(loop: Loop, **given: Any) -> Any:
    return planted(ab.Trial(loop.model, **({"steps": STEPS, "rank_timeout_s": 60.0} | given)))


def shard(loop: Loop) -> None:
    """FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (loop.model.up, loop.model.down, loop.model):
        fully_shard(layer, mesh=mesh)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 10, 0.9)


def data_parallel(slower: float, group_is_seen: bool) -> dict[str, Any]:
    """DDP around a model that the trial converted before; rank 1's steps take `slower` times as long."""
    loop = Loop()
    unseen = mock.patch("torch.distributed.is_initialized", return_value=False)
    with contextlib.nullcontext() if group_is_seen else unseen:
        trial = ab.Trial(loop.model, steps=STEPS)
    factor = slower if dist.get_rank() else 1.0
    planted(trial, 80.0 * factor, 100.0 * factor)
    loop.model = DistributedDataParallel(loop.model)
    loop.turn = 1000 * dist.get_rank()  # other batches
    loop.run(trial, loop.turn + STEPS)
    return answer_of(trial)


def sharded(recipe: str, fp8_all_gather: bool, demand: bool, by_trial: bool) -> dict[str, Any]:
    """FSDP2 of a model that the trial converts, or that is converted before it."""
    loop = Loop()
    if by_trial:
        trial = begun(loop, recipe=recipe, fp8_all_gather=demand)
        shard(loop)
    else:
        config: Any = recipe
        if recipe == "tensorwise":
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=fp8_all_gather)
        convert_to_float8_training(loop.model, config=config)
        shard(loop)
        trial = begun(loop, recipe=recipe, fp8_all_gather=demand)
    loop.turn = 1000 * dist.get_rank()
    loop.run(trial, loop.turn + STEPS)
    return answer_of(trial)


def odd_rank(what: str) -> dict[str, Any]:
    """Rank 1 alone: holds the model in bf16, meets a shorter batch, leaves, raises within a step or between two, or closes."""
    loop, odd = Loop(), dist.get_rank() == 1
    trial = begun(loop, rank_timeout_s=2.0 if what == "stops" else 60.0)
    held = PrecisionSchedule.parse("keep_bf16")

    def before() -> None:
        if odd and what == "shapes":
            loop.rows = 8 if loop.turn == 20 else 16
        if odd and loop.turn == 20 and what == "raises between":
            raise ZeroDivisionError("planted")
        if odd and loop.turn == 20 and what == "closes":
            trial.close()

    def inside() -> None:
        if odd and (what == "bf16" or (what == "bf16 later" and loop.turn >= 40)):
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
    """Rank 1 is given another trial; no collective joins the ranks."""
    loop, odd = Loop(), dist.get_rank() == 1
    given: dict[str, Any] = {"recipe": "tensorwise", "restore": []}
    if odd:
        given |= {"seed": {"seed": 1}, "restore": {"restore": [loop.optimizer]}}.get(what, {})
        if what == "layers":
            given["after"] = "bf16"  # as rank 0's, which comes unconverted, is left
            convert_to_float8_training(loop.model, module_filter_fn=lambda module, fqn: fqn == "up")
    if what == "casts":  # of a recipe of the same name
        own = RECIPES["delayed"]
        if odd:
            own = replace(own, grad_input=own.output)
        given |= {"recipe": "delayed", "after": "bf16"}
        convert_to_float8_training(loop.model, config=own)
    trial = begun(loop, **given)
    return answer_of(trial, steps_run=loop.run(trial, STEPS).steps_run, turn=loop.turn)


def cannot_begin() -> dict[str, Any]:
    """Rank 1 cannot begin: something is wrong at its first step alone."""
    loop = Loop()
    trial: Any = ab.Trial(loop.model, steps=STEPS, rank_timeout_s=60.0)
    raised = ""
    broken = mock.patch("harness.training.ab.trial.Meter", side_effect=RuntimeError("planted"))
    with broken if dist.get_rank() else contextlib.nullcontext():
        try:
            loop.run(trial, STEPS)
        except RuntimeError as error:
            raised = str(error)
    return answer_of(trial, raised=raised, hooks=len(loop.model._forward_hooks))


BOTH_STEPS = 43  # 11 that prove, then three rounds of four arms, a block of one step and one untimed step: 11 + 3 * 8 = 35


def both_gathers() -> dict[str, Any]:
    """Three arms under FSDP2; what each step of each arm gathers is counted, and the third arm is planted to be faster."""
    loop = Loop()
    convert_to_float8_training(loop.model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    trial = ab.Trial(loop.model, steps=BOTH_STEPS, block=1, fp8_all_gather="both")
    shard(loop)
    ms = {BASE: 100.0, "base:again": 100.0, FP8: 80.0, GATHER: 64.0}
    trial._clock = PlantedClock(lambda count: ms[trial._turn.arm])
    sent: dict[str, set[str]] = {}
    while not trial.done:
        with trial.step():
            arm = trial._turn.arm if trial._turn else "after"
            if arm != "after" and trial._turn.purpose == "timed":
                with count_collectives() as counts:
                    loop.step()
                sent.setdefault(arm, set()).add(str(sorted(counts.of("all_gather").items())))
            elif arm != "after":
                loop.step()
    result = trial.result()
    pairs = {"fp8": (FP8, BASE), "gather": (GATHER, BASE), "gains": (GATHER, FP8)}
    return answer_of(
        trial,
        sent=sent,
        between={name: result.between(*pair).speedup for name, pair in pairs.items()},
        gather_proof=result.gather_proof,
        gather_left={layer.recipe.fp8_all_gather for layer in trial._switch.layers},
    )


def same_results() -> bool:
    """A step with codes gathered, and one without, from the same weights: what the model returns, bit for bit."""
    loop = Loop()
    trial = ab.Trial(loop.model, steps=BOTH_STEPS, block=1, fp8_all_gather="both")
    shard(loop)
    found = []
    for arm in (FP8, GATHER, FP8):
        trial._switch.to(arm)
        output, loss = loop.model(loop.batch())
        loss.backward()
        grads = [p.grad.to_local().clone() for p in loop.model.parameters() if isinstance(p.grad, DTensor)]
        loop.optimizer.zero_grad()
        found.append([output.detach(), *grads])
    return len(found[0]) == 5 and equal(found[0], found[1]) and equal(found[0], found[2])


def tensor_parallel() -> dict[str, Any]:
    """A SwiGLU whose layers are cut by fp8core's styles; both ranks train on the same batch."""
    torch.manual_seed(0)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)
            self.down = nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
            return y, (y - x).square().mean()

    loop = Loop()
    loop.model = Mlp()
    convert_to_float8_training(loop.model)
    plan = {
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(),
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    loop.model = parallelize_module(loop.model, mesh, plan)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3, foreach=False)
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 10, 0.9)
    trial = ab.Trial(loop.model, steps=25, block=1, restore=[loop.optimizer])
    trial._clock = PlantedClock(lambda count: 80.0 if trial._turn.is_fp8 else 100.0)
    result = loop.run(trial)
    return answer_of(trial, tokens=result.tokens, flops=result.flops)


def slowed(kind: str, ms: float, more: float, where: str = "inside") -> dict[str, Any]:
    """Each rank's own part of a step is `ms` of work; that of rank 1 takes `more` longer, or is spent between steps."""
    loop = Loop()
    own_s = 1e-3 * ms * (1 + more * dist.get_rank())
    # After a profiled step no time between steps is read, so a block needs two timed ones
    trial = ab.Trial(
        loop.model, **({"steps": 55, "block": 1} if where == "inside" else {"steps": 43, "block": 2})
    )
    if kind == "fsdp":
        shard(loop)
    else:
        loop.model = DistributedDataParallel(loop.model)
    loop.turn = 1000 * dist.get_rank()
    wait = {"before": dist.get_rank() * own_s} if where == "between" else {"inside": own_s}
    loop.run(trial, **{at: functools.partial(time.sleep, seconds) for at, seconds in wait.items()})
    return answer_of(trial, own=trial._known._own)


def raises_within() -> dict[str, Any]:
    """All ranks raise in the middle of a backward pass; then training goes on."""
    loop, plain = Loop(), Loop()
    for each in (loop, plain):
        convert_to_float8_training(each.model)
        shard(each)
    trial = ab.Trial(loop.model, steps=25, block=1, restore=[loop.optimizer, loop.scheduler])

    def raises(*_: Any) -> None:
        if loop.turn == 5:
            raise ZeroDivisionError("planted")

    hook = loop.model.up.register_full_backward_pre_hook(raises)
    with contextlib.suppress(ZeroDivisionError), trial:
        loop.run(trial)
    hook.remove()
    loop.turn = plain.turn
    trial._switch.leave(fp8=True)
    for _ in range(2):
        loop.step()
        plain.step()
    locals_: list[list[Any]] = [[p.to_local() for p in each.model.parameters()] for each in (loop, plain)]
    return answer_of(trial, equal=equal(*locals_))
