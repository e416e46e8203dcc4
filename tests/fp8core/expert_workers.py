"""What a rank of `test_expert_parallel` does, and the process that holds all experts."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable

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


def mixture_step(recipe: str) -> Facts:
    """Largest difference of one rank's loss and gradients from one process, relative to each one's largest element."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def model() -> Mixture:
        torch.manual_seed(0)
        mixture = Mixture()
        mixture.head = (
            nn.Identity()
        )  # a product in high precision depends, in its last bit, on how many rows it has
        return convert_experts_to_float8(mixture, config=recipe) if recipe else mixture

    data = torch.randn(world, 24, 32, generator=torch.Generator().manual_seed(7))
    whole = model()
    want = whole(data.flatten(0, 1)).square().mean()
    want.backward()
    mine = parallelize_experts(model(), mean_gradient=True)
    loss = mine(data[rank]).square().mean()
    loss.backward()
    dist.all_reduce(loss_mean := loss.detach() / world)
    apart = expert_parameters(mine)
    facts = {"loss": float((loss_mean - want.detach()).abs() / want.detach())}
    share = slice(rank * 4 // world, (rank + 1) * 4 // world)
    reference = dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        if parameter.grad is None:
            continue
        if name in apart:
            expected = reference[name.replace("experts.experts.", "experts.")].grad[share]
        else:
            dist.all_reduce(parameter.grad.div_(world))
            expected = reference[name].grad
        facts[name] = float((parameter.grad - expected).abs().max() / expected.abs().max())
    return facts


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


def sharded_by_fsdp() -> dict[str, float]:
    """Largest relative difference of loss and full gradients under FSDP2 from the mean over ranks alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(world, 24, 32, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(0)
    alone = convert_experts_to_float8(Mixture(experts=3), config="rowwise")
    mine = copy.deepcopy(alone)
    for module in (mine.experts, mine):
        fully_shard(module)
    loss, want = (model(data[rank]).square().mean() for model in (mine, alone))
    loss.backward()
    want.backward()
    found = {"loss": float((loss - want).detach().abs() / want.detach())}
    for (name, sharded), plain in zip(mine.named_parameters(), alone.parameters(), strict=True):
        if plain.grad is not None:
            dist.all_reduce(plain.grad.div_(world))
            found[name] = float(
                (sharded.grad.full_tensor() - plain.grad).abs().max() / plain.grad.abs().max()
            )
    return found


def divided() -> dict[str, bool]:
    """Compare the experts' gradients with those of `mean_gradient`, independent of the weights."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("experts", "data"))

    def gradient(change: Callable[[ExpertParallel], Any], *, mean: bool) -> Tensor:
        experts = parallelize_experts(made(""), mean_gradient=mean)
        assert isinstance(experts, ExpertParallel)
        experts = change(experts) or experts
        x, offsets, grad = tokens_of(rank)
        for _ in range(2):
            experts(x, offsets).backward(grad)
        found: Any = experts.experts.gate.grad
        return found.to_local() if hasattr(found, "to_local") else found

    whole = gradient(lambda _: None, mean=False)
    changes: dict[str, Callable[[ExpertParallel], Any]] = {
        "as it is": lambda _: None,
        "copied": copy.deepcopy,
        "assigned": lambda m: m.load_state_dict(m.state_dict(), assign=True) and None,
        "sharded": lambda m: fully_shard(m.experts, mesh=mesh["data"]) and None,
    }
    return {name: torch.equal(gradient(change, mean=True), whole / world) for name, change in changes.items()}


def frozen() -> list[bool]:
    """List which experts' weights have gradients where one of them is frozen."""
    experts = made("")
    experts.gate.requires_grad_(False)
    parallel = parallelize_experts(experts, mean_gradient=True)
    x, offsets, grad = tokens_of(dist.get_rank())
    parallel(x, offsets).backward(grad)
    return [p.grad is not None for p in parallel.parameters()]


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
        "steps": {recipe: mixture_step(recipe) for recipe in ("", "rowwise")},
        "refusals": refusals(),
        "shares": shares(),
        "proven": proven(),
        "fsdp": sharded_by_fsdp(),
        "divided": divided(),
        "frozen": frozen(),
    }
