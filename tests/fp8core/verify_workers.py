"""What the ranks of `test_verify_ranks.py` run; each function returns what `verify` reports on its rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import tensor_parallel_plans as parallel
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8core import RECIPES, convert_to_float8_training, verify
from fp8core.distributed import sequence_parallel

GATHERED, SHARED_AMAXES = sequence_parallel._gathered, sequence_parallel.shared_amaxes
DONE = "tests/verify/silent rank may end"


def other_parts_missing(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """No gather: this rank's tokens in the places of all ranks."""
    copies = [part] * dist.get_world_size()
    return torch.cat(copies, like.placements[0].dim).contiguous()


def ranks_changed_places(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Each part lies in the place of the next rank."""
    parts = GATHERED(part, like).chunk(dist.get_world_size(), like.placements[0].dim)
    return torch.cat([*parts[1:], parts[0]], like.placements[0].dim).contiguous()


def scales_changed_places(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Codes arrive rightly, scales of tokens in the place of the next rank."""
    return (GATHERED if part.element_size() == 1 else ranks_changed_places)(part, like)


def one_code_changed(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The last rank's first code arrives one too large on rank 0."""
    whole = GATHERED(part, like)
    if dist.get_rank() == 0 and part.element_size() == 1:
        part = whole.view(torch.uint8).chunk(dist.get_world_size(), like.placements[0].dim)[-1]
        part[(0,) * part.dim()].add_(1)
    return whole


def amaxes_of_this_rank(tp: Any, recipe: Any, memory: Any, *seen: Any) -> list[None]:
    """Each rank scales its tokens by their own amax, though all parts share one scale."""
    return [None] * len(seen)


def tokens_turned(part: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Tokens of this rank arrive in the opposite order, on all ranks alike."""
    dim = like.placements[0].dim
    return GATHERED(
        part.view(torch.uint8).flip(dim).view(part.dtype) if part.element_size() == 1 else part, like
    )


# name -> (recipe, style, what is replaced, by what)
GATHER_FAULTS: dict[str, tuple[str, str, str, Any]] = {
    "own tokens for all": ("tensorwise", "float8 sp", "_gathered", other_parts_missing),
    "tokens changed places": ("tensorwise", "float8 sp shared", "_gathered", ranks_changed_places),
    "scales changed places": ("rowwise", "float8 sp", "_gathered", scales_changed_places),
    "one code changed": ("tensorwise", "float8 sp", "_gathered", one_code_changed),
    "amax of own tokens": ("tensorwise", "float8 sp", "shared_amaxes", amaxes_of_this_rank),
    "opposite order": ("rowwise", "float8 sp shared", "_gathered", tokens_turned),
}


def gather_verdicts() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Problems of a step in sequence parallelism, by planted fault: (without it, with it)."""
    verdicts = {}
    for name, (recipe, style, target, replacement) in GATHER_FAULTS.items():
        torch.manual_seed(0)
        model = parallel.parallel(RECIPES[recipe], style, (32, 64, True))

        def step(model: nn.Module = model, style: str = style) -> None:
            parallel.passes(model, parallel.data(32, spread=2.0), style)

        without = verify(step, model, announce=False).problems
        with mock.patch.object(sequence_parallel, target, replacement):
            planted = verify(step, model, announce=False)
        assert planted.ok == (not planted.problems)
        verdicts[name] = without, planted.problems
    return verdicts


def _model(recipe: str = "tensorwise") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=recipe)
    return model, torch.randn(16, 32)


def silent_rank() -> tuple[bool, str]:
    """(ok, line); the last rank never calls `verify`, and stays alive until the others have their verdicts."""
    store = dist.distributed_c10d._get_default_store()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        store.wait([f"{DONE}/{other}" for other in range(last)])
        return False, "silent"
    model, x = _model()
    proof = verify(lambda: model(x).sum().backward(), model, announce=False, rank_timeout_s=0.5)
    store.set(f"{DONE}/{rank}", "1")
    return proof.ok, proof.line


def raising_rank() -> tuple[bool, str]:
    """(ok, line); the step of the last rank raises, after which the model of that rank is what it was."""
    model, x = _model()
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        loss = model(x).sum()
        loss.backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("no data\nfor this rank")

    try:
        proof = verify(step, model, announce=False)
    except ArithmeticError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        return False, str(error)
    return proof.ok, proof.line


def disproving_rank() -> tuple[bool, str]:
    """(ok, line); the last rank runs the product in high precision."""
    model, x = _model()
    if dist.get_rank() == dist.get_world_size() - 1:
        model = convert_to_float8_training(
            nn.Sequential(nn.Linear(32, 32)), config=RECIPES["tensorwise"].emulated()
        )
    proof = verify(lambda: model(x).sum().backward(), model, announce=False)
    return proof.ok, proof.line


def halves_changed_places(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([*weight.chunk(2)[::-1]])


def own_half_twice(weight: torch.Tensor) -> torch.Tensor:
    """In its right place, and in the other rank's."""
    return weight.chunk(2)[dist.get_rank()].repeat(2, 1)


def other_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.5 * dist.get_rank()


# name -> (how the model is shared, what becomes of the weight that the layer reads, recipe)
WEIGHT_FAULTS: dict[str, tuple[str, Any, str]] = {
    "FSDP2, halves changed places": ("fsdp", halves_changed_places, "rowwise"),
    "FSDP2, the own half twice": ("fsdp", own_half_twice, "rowwise"),
    "FSDP2, another weight on one rank": ("fsdp", other_weight, "rowwise"),
    "DDP, replicas differ": ("ddp", other_weight, "tensorwise"),
}


def weight_verdicts() -> dict[str, tuple[tuple[str, ...], tuple[str, ...], int]]:
    """Problems of a step by planted fault: (without it, with it, layers whose weight was compared over ranks)."""
    verdicts = {}
    for name, (how, change, recipe) in WEIGHT_FAULTS.items():
        model, x = _model(recipe)
        shared: Any = (
            DistributedDataParallel(model)
            if how == "ddp"
            else fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        )

        def step(shared: Any = shared, x: torch.Tensor = x) -> None:
            shared(x).sum().backward()

        proof = verify(step, model, announce=False)

        def plant(module: Any, _: object, change: Any = change) -> None:
            with torch.no_grad():
                module[0].weight.data.copy_(change(module[0].weight))

        model.register_forward_pre_hook(plant)
        planted = verify(step, model, announce=False).problems
        verdicts[name] = proof.problems, planted, proof.compared["shared_weights"]
    return verdicts


def told() -> dict[str, Any]:
    """All of the above in one launch."""
    return {
        "gathers": gather_verdicts(),
        "weights": weight_verdicts(),
        "raising": raising_rank(),
        "disproving": disproving_rank(),
        "silent": silent_rank(),  # last: calls of `verify` are numbered on each rank
    }
