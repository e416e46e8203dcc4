"""What a rank of `test_expert_parallel` does, and the process that holds all experts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixtures import Experts, Mixture, ends
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8core import RECIPES, convert_experts_to_float8, quantize, verify
from fp8core.distributed.expert_parallel import (
    PAYLOADS,
    ExpertParallel,
    expert_parameters,
    gather_experts,
    parallelize_experts,
)
from fp8core.distributed.wire import count_collectives

EXPERTS, WIDTH, FFN = 8, 128, 128
Facts = dict[str, Any]


def sizes_of(rank: int) -> list[int]:
    """Tokens of a rank for each expert: uneven, some none, and rank 3 has none at all."""
    return [0] * EXPERTS if rank == 3 else [5 + 11 * rank, 0, 7, 2 + rank, 1, 0, 9, 3 * rank]


def tokens_of(rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(x sorted by expert, offsets, gradient of the result) of a rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    sizes = sizes_of(rank)
    x, grad = (torch.randn(sum(sizes), WIDTH, generator=generator).to(dtype) for _ in range(2))
    return x, ends(*sizes), grad


def made(recipe: str, dtype: torch.dtype = torch.float32) -> Experts:
    torch.manual_seed(0)
    experts = Experts(EXPERTS, WIDTH, FFN).to(dtype)
    if recipe:
        convert_experts_to_float8(experts, config=RECIPES[recipe])
    return experts


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a row becomes that travels in FP8."""
    return quantize(x, dtype, "rowwise", power_of_two=True).dequantize()


def alone(
    world: int, recipe: str, dispatch: str, gradient: str, *, by_rank: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(output, grad of x, grads of weights) of all ranks' tokens, by expert and then by rank, in one process.

    by_rank: the experts of each rank see their tokens apart from the others', as they do when they are parallel.
    """
    experts, sizes = made(recipe), [sizes_of(rank) for rank in range(world)]
    parts = [tokens_of(rank) for rank in range(world)]
    x, grad = (
        torch.cat([part[which].split(sizes[r])[e] for e in range(EXPERTS) for r, part in enumerate(parts)])
        for which in (0, 2)
    )
    x = (rounded(x, torch.float8_e4m3fn) if dispatch == "fp8" else x).requires_grad_()
    grad = rounded(grad, torch.float8_e5m2) if gradient == "fp8" else grad
    counts = [sum(column) for column in zip(*sizes, strict=True)]
    share, outputs = (EXPERTS // world if by_rank else EXPERTS), []
    shares = [slice(first, first + share) for first in range(0, EXPERTS, share)]
    for mine, rows in zip(shares, x.split([sum(counts[mine]) for mine in shares]), strict=True):
        weights = {name: p[mine] for name, p in experts.named_parameters()}
        outputs.append(torch.func.functional_call(experts, weights, (rows, ends(*counts[mine]))))
    output = torch.cat(outputs)
    output.backward(grad)
    assert x.grad is not None
    grad_x = rounded(x.grad, torch.float8_e5m2) if gradient == "fp8" else x.grad
    return output.detach(), grad_x, {name: p.grad for name, p in experts.named_parameters()}


def of_rank(together: Tensor, rank: int, world: int) -> Tensor:
    """The rows of one rank, by expert, among those that `alone` returns."""
    pieces = together.split([sizes_of(r)[e] for e in range(EXPERTS) for r in range(world)])
    return torch.cat([pieces[e * world + rank] for e in range(EXPERTS)])


def parallel(cases: list[tuple[str, str, str, bool]]) -> list[dict[str, bool]]:
    """Compare one rank's output and gradients with those of one process, bit for bit; a dict for each case."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for recipe, dispatch, gradient, by_rank in cases:
        experts = made(recipe)
        whole = {name: p.detach().clone() for name, p in experts.named_parameters()}
        sharded = parallelize_experts(experts, dispatch=dispatch, gradient=gradient)
        x, offsets, grad = tokens_of(rank)
        x.requires_grad_()
        output = sharded(x, offsets)
        output.backward(grad)
        assert x.grad is not None
        want, want_x, want_weights = alone(world, recipe, dispatch, gradient, by_rank=by_rank)
        equal = {
            "output": torch.equal(output.detach(), of_rank(want, rank, world)),
            "x": torch.equal(x.grad, of_rank(want_x, rank, world)),
        }
        share = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        for name, weight in sharded.experts.named_parameters():
            equal[name] = torch.equal(weight.grad, want_weights[name][share])
            equal[f"{name} itself"] = torch.equal(weight.detach(), whole[name][share])
        gathered = gather_experts(sharded)
        equal["gathered"] = gathered.keys() == whole.keys() and all(
            torch.equal(gathered[name], whole[name]) for name in whole
        )
        found.append(equal)
    return found


CASES = [
    ("", "high_precision", "high_precision", False),
    ("rowwise", "high_precision", "high_precision", False),
    ("rowwise", "fp8", "high_precision", False),
    ("rowwise", "fp8", "fp8", False),
    ("rowwise_with_gw_hp", "fp8", "fp8", False),
    ("blockwise", "high_precision", "high_precision", False),
    ("tensorwise", "high_precision", "high_precision", True),
    ("tensorwise", "fp8", "fp8", True),
]


def sent_by(dispatch: str, gradient: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each all-to-all that a rank hands over, forward and backward."""
    x, offsets, grad = tokens_of(dist.get_rank(), torch.bfloat16)
    sharded = parallelize_experts(made("rowwise", torch.bfloat16), dispatch=dispatch, gradient=gradient)
    with count_collectives() as counts:
        sharded(x.requires_grad_(), offsets).backward(grad)
    return [(sent.dtype, sent.size_bytes) for sent in counts.sent if sent.collective == "all_to_all"]


STEPS = (("", False), ("rowwise_with_gw_hp", False), ("rowwise", True))


def mixture_step(recipe: str, is_sharded: bool) -> dict[str, float]:
    """Largest relative difference of loss and whole gradients, with parallel experts or under FSDP2, from the mean over ranks
    that each hold everything."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(24, 32, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    alone = Mixture(experts=3 if is_sharded else 4)
    if recipe:
        convert_experts_to_float8(alone, config=recipe)
    mine = copy.deepcopy(alone)
    if is_sharded:
        for module in (mine.experts, mine):
            fully_shard(module)
    else:
        parallelize_experts(mine, mean_gradient=True)
    loss, want = (model(data).square().mean() for model in (mine, alone))
    loss.backward()
    want.backward()
    found = {"loss": float((loss - want).detach().abs() / want.detach())}
    apart = () if is_sharded else expert_parameters(mine)
    for (name, parameter), plain in zip(mine.named_parameters(), alone.parameters(), strict=True):
        if plain.grad is None:
            continue
        got, expected = parameter.grad, plain.grad.div_(world)
        dist.all_reduce(expected)
        if is_sharded:
            got = got.full_tensor()
        elif name in apart:
            expected = expected.chunk(world)[rank]
        else:
            dist.all_reduce(got.div_(world))
        found[name] = float((got - expected).abs().max() / expected.abs().max())
    return found


class Others(nn.Module):
    """What the share of each rank must and must not hold of: a bias by expert, a gain, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 2)
        self.experts = Experts(4, 32, 32)
        self.experts.bias = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.experts.gain = nn.Parameter(torch.ones(4))


def shares() -> Facts:
    """Shapes of one rank's parameters, and whether the gathered state is that of one process."""
    torch.manual_seed(0)
    model = Others()
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    parallelize_experts(model)
    gathered = gather_experts(model)
    return {
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
        "apart": sorted(expert_parameters(model)),
        "bias": model.experts.experts.bias.tolist(),
        "same": gathered.keys() == before.keys() and all(torch.equal(gathered[k], before[k]) for k in before),
    }


def gradients(mean: bool, way: str = "as it is") -> list[Tensor | None]:
    """Gradients of a rank's experts after two passes, the first weight frozen where `way` says so."""
    experts = made("")
    experts.gate.requires_grad_(way != "frozen")
    shared = parallelize_experts(experts, mean_gradient=mean)
    if way == "copied":
        shared = copy.deepcopy(shared)
    elif way == "assigned":
        shared.load_state_dict(shared.state_dict(), assign=True)
    elif way == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("experts", "data"))
        fully_shard(shared.experts, mesh=mesh["data"])
    x, offsets, grad = tokens_of(dist.get_rank())
    for _ in range(2):
        shared(x, offsets).backward(grad)
    grads: list[Any] = [p.grad for p in shared.parameters()]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


def divided() -> dict[str, list[bool]]:
    """Whether each gradient of `mean_gradient` is that without it, divided."""
    whole = [grad / dist.get_world_size() for grad in gradients(mean=False)]
    return {
        way: [
            got is not None and torch.equal(got, want)
            for got, want in zip(gradients(True, way), whole, strict=True)
        ]
        for way in ("as it is", "copied", "assigned", "sharded", "frozen")
    }


def proven() -> str:
    """Line that `verify` reports for a step with parallel experts."""
    model = parallelize_experts(convert_experts_to_float8(Mixture(), config="rowwise"), dispatch="fp8")
    x = torch.randn(24, 32)
    return verify(lambda: model(x).square().mean().backward(), model, announce=False).line


def refusals() -> list[str]:
    messages = []
    for attempt in (
        lambda: parallelize_experts(Experts(3, 32, 32)),
        lambda: parallelize_experts(nn.Linear(4, 4)),
        lambda: parallelize_experts(Experts(2, 32, 32), dispatch="fp4"),
        lambda: ExpertParallel(Experts(2, 32, 32))(torch.zeros(2, 2, 32), ends(1, 1)),
        lambda: ExpertParallel(Experts(2, 32, 32))(torch.zeros(5, 32), ends(1, 1)),
        lambda: parallelize_experts(parallelize_experts(Mixture())),
        lambda: parallelize_experts(fully_shard(Mixture())),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the messages are looked at in the test
            attempt()
        messages.append(str(caught.value))
    return messages


def everything() -> Facts:
    """Collect in one launch everything that the tests check on one of two ranks."""
    return {
        "sent": {pair: sent_by(*pair) for pair in itertools.product(PAYLOADS, PAYLOADS)},
        "steps": {case: mixture_step(*case) for case in STEPS},
        "refusals": refusals(),
        "shares": shares(),
        "proven": proven(),
        "divided": divided(),
    }
