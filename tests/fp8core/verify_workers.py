"""What the ranks of `test_verify_ranks.py` run; each function returns what `verify` reports on its rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import tensor_parallel_plans as parallel
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8core import RECIPES, convert_to_float8_training, verify
from fp8core.distributed import gathering

GATHERED, SHARED_AMAXES = gathering._gathered, gathering.shared_amaxes
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


def amaxes_of_this_rank(cut: Any, recipe: Any, memory: Any, *seen: Any) -> list[None]:
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
        with mock.patch.object(gathering, target, replacement):
            planted = verify(step, model, announce=False)
        assert planted.ok == (not planted.problems)
        verdicts[name] = without, planted.problems
    return verdicts


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config="tensorwise")
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


def told() -> dict[str, Any]:
    """All of the above in one launch."""
    return {
        "gathers": gather_verdicts(),
        "raising": raising_rank(),
        "disproving": disproving_rank(),
        "silent": silent_rank(),  # last: calls of `verify` are numbered on each rank
    }
