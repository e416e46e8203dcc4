"""Experts against a loop over tokens, in float64, and the grouped products against torch's own checks of operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8core import RECIPES, audit, convert_experts_to_float8, convert_to_float8_training
from harness.training.models import build
from harness.training.models.llama_moe import Moe, MoeConfig, Router, grouped_mm, grouped_mm_weight_grad

SMALL = MoeConfig(31, 16, 1, 16, 2, 1, 24, experts=5, top_k=2)


def made(config: MoeConfig = SMALL) -> Moe:
    torch.manual_seed(0)
    moe = Moe(config)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.3)
    return moe


def by_token(moe: Moe, x: Tensor) -> Tensor:
    """Each token through its experts, one at a time; x [tokens, width] of any dtype."""
    rows = []
    for token in x:
        p = (moe.router.weight.to(x.dtype) @ token).softmax(0)
        chosen = sorted(range(len(p)), key=lambda e: -p[e].item())[: moe.top_k]
        total = sum(p[e] for e in chosen)
        experts = moe.experts
        row = torch.zeros_like(token)
        for e in chosen:
            gate, up, down = (w[e].to(x.dtype) for w in (experts.gate, experts.up, experts.down))
            row = row + p[e] / total * ((functional.silu(token @ gate) * (token @ up)) @ down)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_output_and_gradients(top_k: int) -> None:
    """Oracle: `by_token` in float64. float32 sums of at most 24 products, three deep: some 100 roundings."""
    moe = made(MoeConfig(31, 16, 1, 16, 2, 1, 24, experts=5, top_k=top_k))
    x = torch.randn(2, 9, 16, requires_grad=True)
    got = moe(x)
    weight = torch.randn_like(got)
    grads = torch.autograd.grad((got * weight).sum(), [x, *moe.parameters()])
    x64 = x.detach().double().flatten(0, 1).requires_grad_()
    want = by_token(moe, x64)
    wanted = torch.autograd.grad((want * weight.double().flatten(0, 1)).sum(), [x64, *moe.parameters()])
    for one, other in zip([got, *grads], [want, *wanted], strict=True):
        error = (one.double().flatten() - other.double().flatten()).abs().max()
        scale = max(
            other.abs().max(), 1.0
        )  # that of the terms; with one expert a token the router's cancel to 0
        assert error < 100 * 2**-24 * scale


def test_no_token_is_dropped_when_all_choose_one_expert() -> None:
    """Oracle: `by_token`; four of five experts get no token, and their gradients are zero."""
    moe = made(MoeConfig(31, 16, 1, 16, 2, 1, 24, experts=5, top_k=1))
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[3] = 1.0
    x = torch.rand(1, 40, 16)
    got = moe(x)
    torch.testing.assert_close(got[0].double(), by_token(moe, x[0].double()), rtol=1e-5, atol=1e-6)
    got.sum().backward()
    used = moe.experts.up.grad.abs().amax((1, 2)) > 0
    assert used.tolist() == [False, False, False, True, False]


def test_bfloat16_and_autocast() -> None:
    """Oracle: `by_token` in float64 on bfloat16 weights and tokens; products are rounded to 8 bits, three deep."""
    moe = made()
    x = torch.randn(1, 32, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = moe(x.float())
    assert mixed.dtype == torch.float32
    pure = moe.bfloat16()(x)
    assert pure.dtype == torch.bfloat16
    want = by_token(moe, x[0].double())
    for got in (mixed, pure):
        assert (got[0].double() - want).norm() < 3 * 2**-8 * want.norm()


@pytest.mark.parametrize("mixed", [False, True])
def test_experts_in_fp8(mixed: bool) -> None:
    """Oracle: the same experts in high precision. A product of two e4m3 operands has 28.5 dB; gate and up multiply each
    other, and the result is multiplied once more: 28.5 - 10 log10(3) = 23.7 dB, less what the slope of SiLU adds.

    Every seventh token is 2**12 times as large. "rowwise" scales each by itself; tensorwise the others pay for it.
    """
    moe = made(MoeConfig(31, 64, 1, 64, 2, 1, 96, experts=5, top_k=2))
    large = torch.arange(64) % 7 == 0
    x = torch.randn(1, 64, 64) * torch.where(large, 2.0**12, 1.0)[:, None]
    errors = {}
    for recipe in (None, "rowwise", "tensorwise"):
        moe.experts.multiply.recipe = RECIPES[recipe] if recipe else None
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed), torch.no_grad():
            got = moe(x)
        assert got.dtype == torch.float32
        if recipe is None:
            want = got[0].double()
        else:
            errors[recipe] = 20 * torch.log10(want.norm(dim=1) / (want - got[0].double()).norm(dim=1))
    for tokens in (large, ~large):
        assert 22 < errors["rowwise"][tokens].mean() < 25
    assert errors["tensorwise"][~large].mean() < 15


def test_operators() -> None:
    """Oracle: torch.library.opcheck (schema, shapes of the fake, autograd registration, tracing)."""
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    x, g = torch.randn(8, 4, requires_grad=True), torch.randn(8, 5)
    weight = torch.randn(3, 4, 5, requires_grad=True)
    torch.library.opcheck(grouped_mm, (x, weight, ends))
    torch.library.opcheck(grouped_mm_weight_grad, (x.detach(), g, ends))


def test_neither_router_nor_experts_are_converted() -> None:
    """Oracle: the guide's filter. 16 experts would make the router's shape one that FP8 takes; both say why not."""
    model = nn.ModuleList([Moe(MoeConfig(31, 16, 1, 32, 2, 1, 48, experts=16, top_k=2)), nn.Linear(32, 32)])
    report = audit(convert_to_float8_training(model, config="tensorwise"))
    assert [layer.fqn for layer in report.converted] == ["1"]
    (router,) = report.not_converted
    assert (router.fqn, router.kind) == ("0.router", "Router")
    assert "own forward" in router.reason
    assert type(model[0].router) is Router
    assert [found.fqn for found in report.experts] == [f"0.experts.{name}" for name in ("gate", "up", "down")]
    assert all("unless convert_experts_to_float8" in found.reason for found in report.experts)


@pytest.mark.parametrize(
    ("dtype", "recipe"), [(torch.float32, ""), (torch.bfloat16, ""), (torch.float32, "rowwise")]
)
def test_one_graph(dtype: torch.dtype, recipe: str) -> None:
    """Oracle: eager; tokens move between experts within the graph, and aot_eager runs it without fusion."""
    model = build("llama_moe_tiny", dtype=dtype, layers=1)
    if recipe:
        convert_experts_to_float8(model, config=recipe)
    tokens = torch.randint(0, 256, (2, 17))
    batch = tokens[:, :-1], tokens[:, 1:]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    loss, want = compiled(*batch), model(*batch)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for got, grad in zip(grads, torch.autograd.grad(want, list(model.parameters())), strict=True):
        torch.testing.assert_close(got, grad, rtol=2**-7, atol=2**-7 * grad.abs().max().item())
