"""verify on two gloo processes: planted faults of gathers, and ranks that are silent, raise or disprove.

Oracle: the same step without the fault, against which no rank reports anything.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tensor_parallel_plans as parallel
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8core import RECIPES, Recipe, convert_to_float8_training, verify
from fp8core.distributed import sequence_parallel
from fp8core.proof.verify.ranks import Ranks
from fp8core.proof.verify.shared_weights import checksum

GATHERED = sequence_parallel._gathered


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


@pytest.mark.parametrize("name", GATHER_FAULTS)
@on_ranks(2)
def test_codes_that_are_gathered_wrongly_are_no_proof(name: str) -> None:
    """Every rank says so: of its own codes, or of what another rank reports."""
    recipe, style, target, replacement = GATHER_FAULTS[name]
    torch.manual_seed(0)
    model = parallel.parallel(RECIPES[recipe], style, (32, 64, True))

    def step() -> None:
        parallel.passes(model, parallel.data(32, spread=2.0), style)

    assert not verify(step, model, announce=False).problems
    with mock.patch.object(sequence_parallel, target, replacement):
        planted = verify(step, model, announce=False)
    assert not planted.ok
    assert any("gathered" in problem for problem in planted.problems), planted.problems
    if name == "one code changed":  # named by the rank that received it
        if dist.get_rank() == 0:
            assert any("gathered input: codes of rank 1" in line for line in planted.problems)
        else:
            assert all(line.startswith("rank 0: ") for line in planted.problems), planted.problems


def _model(recipe: Recipe | str = "tensorwise") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=recipe)
    return model, torch.randn(16, 32)


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


@pytest.mark.parametrize("name", WEIGHT_FAULTS)
@on_ranks(2)
def test_ranks_that_compute_with_different_weights_are_no_proof(name: str) -> None:
    how, change, recipe = WEIGHT_FAULTS[name]
    model, x = _model(recipe)
    shared: Any = (
        DistributedDataParallel(model)
        if how == "ddp"
        else fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    )

    def step() -> None:
        shared(x).sum().backward()

    proof = verify(step, model, announce=False)
    assert not proof.problems
    assert proof.compared["shared_weights"] == 1

    def plant(module: Any, _: object) -> None:
        with torch.no_grad():
            module[0].weight.data.copy_(change(module[0].weight))

    model.register_forward_pre_hook(plant)
    planted = verify(step, model, announce=False).problems
    assert any("weight" in problem for problem in planted), planted


def test_a_weight_is_alike_only_where_every_rank_of_its_group_read_it() -> None:
    """Oracle: what the other rank has said: the same, another one, nothing of one layer."""
    mine = Ranks()
    mine.rank, mine.size = 0, 2
    mine.weights = dict.fromkeys(("same", "other", "not called"), ((0, 1), 7))
    told = ["", {"same": [[0, 1], 7], "other": [[0, 1], 8]}]
    with mock.patch.object(mine, "heard", autospec=True, return_value=told):
        (problem,) = mine.problems(1.0)
    assert "other" in problem
    assert mine.alike == {"same"}


def test_a_checksum_knows_a_matrix_from_its_transpose() -> None:
    x = torch.randn(32, 32)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(x.t())
    assert checksum(x) != checksum(x.flip(0))


@on_ranks(2)
def test_a_rank_that_does_not_answer_is_named() -> None:
    """It never calls `verify`, and stays alive until the other has its verdict."""
    store, done = dist.distributed_c10d._get_default_store(), "tests/verify/silent rank may end"
    if dist.get_rank() == 1:
        store.wait([done])
        return
    model, x = _model()
    proof = verify(lambda: model(x).sum().backward(), model, announce=False, rank_timeout_s=0.5)
    store.set(done, "1")
    assert not proof.ok
    assert "rank 1 did not answer" in proof.line


@on_ranks(2)
def test_what_a_collective_writes_is_put_back() -> None:
    """Into a buffer of the model, by no write that its version counts."""
    model, x = _model()
    model.register_buffer("total", torch.ones(4))

    def step() -> None:
        model(x).sum().backward()
        dist.all_reduce(model.total)

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.problems
    assert torch.equal(model.total, torch.ones(4))


@on_ranks(2)
def test_a_rank_that_raises_is_named_with_its_error() -> None:
    """The exception passes through on its own rank, whose model is what it was."""
    model, x = _model()
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        model(x).sum().backward()
        if dist.get_rank() == 1:
            raise ArithmeticError("no data\nfor this rank")

    if dist.get_rank() == 0:
        proof = verify(step, model, announce=False)
        assert not proof.ok
        assert "rank 1: raised ArithmeticError" in proof.line
        return
    with pytest.raises(ArithmeticError, match="no data"):
        verify(step, model, announce=False)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_a_rank_that_disproves_is_named() -> None:
    """The last rank runs the product in high precision."""
    model, x = _model(RECIPES["tensorwise"].emulated() if dist.get_rank() else "tensorwise")
    proof = verify(lambda: model(x).sum().backward(), model, announce=False)
    assert not proof.ok
    if dist.get_rank() == 0:
        assert proof.line.startswith("FP8 NOT verified: rank 1: 1 of 1 converted layers are emulated")
    else:
        assert "rank 1" not in proof.line
