"""Expert parallelism against one process that holds all experts: outputs, every gradient, bytes on the wire."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixtures import Experts, Mixture, ends
from on_ranks import on_ranks
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
from fp8core.proof.wire import count_collectives

EXPERTS, WIDTH, FFN = 8, 128, 128


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


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)
@on_ranks(4)
def test_equals_one_process(world: int) -> None:
    """Oracle: one process with all experts and all tokens, bit for bit: each expert sees the same rows in the same order.

    Tensorwise the process runs the experts of each rank apart, since their tokens share a scale. Tokens and gradients
    that travel in FP8 are rounded by `quantize` beforehand. Rank 3 has no token, expert 1 none on any rank.
    """
    rank = dist.get_rank()
    for recipe, dispatch, gradient, by_rank in CASES:
        experts = made(recipe)
        whole = {name: p.detach().clone() for name, p in experts.named_parameters()}
        sharded = parallelize_experts(experts, dispatch=dispatch, gradient=gradient)
        x, offsets, grad = tokens_of(rank)
        x.requires_grad_()
        output = sharded(x, offsets)
        output.backward(grad)
        want, want_x, want_weights = alone(world, recipe, dispatch, gradient, by_rank=by_rank)
        assert torch.equal(output.detach(), of_rank(want, rank, world))
        assert torch.equal(x.grad, of_rank(want_x, rank, world))
        share = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        for name, weight in sharded.experts.named_parameters():
            assert torch.equal(weight.grad, want_weights[name][share]), name
            assert torch.equal(weight.detach(), whole[name][share]), name
        same_tensors(gather_experts(sharded), whole)


def same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@on_ranks(2)
def test_bytes_on_the_wire() -> None:
    """Oracle: counted at the collective. FP8 is half of bfloat16 and a scale of 4 bytes a row; counts are int32."""
    rank = dist.get_rank()
    mine = sum(sizes_of(rank))  # rows that this rank sends and gets back
    held = sum(sum(sizes_of(r)[4 * rank : 4 * rank + 4]) for r in range(2))  # rows of its experts
    kinds = {"high_precision": ("bfloat16", 2 * WIDTH), "fp8": ("uint8", WIDTH + 4)}
    for dispatch, gradient in itertools.product(PAYLOADS, PAYLOADS):
        x, offsets, grad = tokens_of(rank, torch.bfloat16)
        sharded = parallelize_experts(made("rowwise", torch.bfloat16), dispatch=dispatch, gradient=gradient)
        with count_collectives() as counts:
            sharded(x.requires_grad_(), offsets).backward(grad)
        sent = [(each.dtype, each.size_bytes) for each in counts.sent if each.collective == "all_to_all"]
        steps = [
            (mine, dispatch),  # tokens go
            (held, "high_precision"),  # results come back
            (mine, gradient),  # the results' gradients go
            (held, gradient),  # the tokens' come back
        ]
        wanted = [(kinds[kind][0], rows * kinds[kind][1]) for rows, kind in steps]
        assert sent == [("int32", 4 * EXPERTS), *wanted]


@pytest.mark.parametrize(
    ("recipe", "is_sharded"), [("", False), ("rowwise_with_gw_hp", False), ("rowwise", True)]
)
@on_ranks(2)
def test_a_model_with_a_router(recipe: str, is_sharded: bool) -> None:
    """Oracle: each rank's own whole model, averaged. Parallel experts add the ranks' tokens in one product, and FSDP2 (3 experts
    on 2 ranks) divides before it adds: 1e-6 for float32."""
    rank = dist.get_rank()
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
    assert float((loss - want).detach().abs() / want.detach()) <= 1e-6
    apart = () if is_sharded else expert_parameters(mine)
    with_gradients = 0
    for (name, parameter), plain in zip(mine.named_parameters(), alone.parameters(), strict=True):
        if plain.grad is None:
            continue
        got, expected = parameter.grad, plain.grad.div_(2)
        dist.all_reduce(expected)
        if is_sharded:
            got = got.full_tensor()
        elif name in apart:
            expected = expected.chunk(2)[rank]
        else:
            dist.all_reduce(got.div_(2))
        assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-6, name
        with_gradients += 1
    assert with_gradients > 3


@on_ranks(2)
def test_verify() -> None:
    """Oracle: the profiler, in each rank: the GEMMs of its own experts, as many as predicted."""
    model = parallelize_experts(convert_experts_to_float8(Mixture(), config="rowwise"), dispatch="fp8")
    x = torch.randn(24, 32)
    proof = verify(lambda: model(x).square().mean().backward(), model, announce=False)
    assert proof.ok, proof.line
    assert len(proof.experts) == 1
    assert proof.counted > 0


def test_fp8_tokens_are_cast_to_the_codes_that_they_came_in() -> None:
    """Oracle: tokens that never travelled. The output of "rowwise" is the same, bit for bit, over 40 binades and zeros."""
    experts = made("rowwise")
    scales = torch.logspace(-6, 6, 200)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(200, WIDTH) * scales * 2.0 ** torch.randint(-14, 1, (200, WIDTH))).to(dtype)
        x[7] = 0
        offsets = ends(*[25] * EXPERTS)
        assert torch.equal(experts(x, offsets), experts(rounded(x, torch.float8_e4m3fn), offsets))


class Others(nn.Module):
    """What the share of each rank must and must not hold of: a bias by expert, a gain, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 2)
        self.experts = Experts(4, 32, 32)
        self.experts.bias = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.experts.gain = nn.Parameter(torch.ones(4))


@on_ranks(2)
def test_what_each_rank_keeps() -> None:
    """Oracle: by hand. Weights and biases by expert are halved, whatever else has as many elements is whole."""
    torch.manual_seed(0)
    model, rank = Others(), dist.get_rank()
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    parallelize_experts(model)
    same_tensors(gather_experts(model), before)
    names = {f"experts.experts.{name}" for name in ("bias", "down", "gate", "up")}
    assert set(expert_parameters(model)) == names
    assert model.experts.experts.bias.tolist() == before["experts.bias"].chunk(2)[rank].tolist()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["experts.experts.gate"] == (2, 32, 32)
    assert shapes["experts.experts.gain"] == (4,)
    assert shapes["convolution.weight"] == (4, 4, 2)


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


@on_ranks(2)
def test_mean_gradient() -> None:
    """Oracle: gradients without it, divided; of weights that are new tensors since `parallelize_experts`, too."""
    whole = [grad / 2 for grad in gradients(mean=False)]
    for way in ("as it is", "copied", "assigned", "sharded", "frozen"):
        first, *others = gradients(True, way)
        assert (first is None) if way == "frozen" else torch.equal(first, whole[0]), way
        assert all(map(torch.equal, others, whole[1:])), way


@on_ranks(2)
def test_bad_input() -> None:
    """Each rank refuses, none waits for another."""
    alone = ExpertParallel(Experts(2, 32, 32))
    for said, attempt in (
        ("3 experts", lambda: parallelize_experts(Experts(3, 32, 32))),
        ("no experts", lambda: parallelize_experts(nn.Linear(4, 4))),
        ("'fp4'", lambda: parallelize_experts(Experts(2, 32, 32), dispatch="fp4")),
        (r"\[T, K\]", lambda: alone(torch.zeros(2, 2, 32), ends(1, 1))),
        ("5 rows", lambda: alone(torch.zeros(5, 32), ends(1, 1))),
        ("already", lambda: parallelize_experts(parallelize_experts(Mixture()))),
        ("DTensor already", lambda: parallelize_experts(fully_shard(Mixture()))),
    ):
        with pytest.raises(ValueError, match=said):
            attempt()
