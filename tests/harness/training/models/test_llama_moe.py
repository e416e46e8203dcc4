"""Experts against a loop over tokens, in float64, and compiled against eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8core import convert_experts_to_float8
from harness.training.models import build
from harness.training.models.llama_moe import Moe, MoeConfig

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


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        (torch.float32, ""),
        (torch.bfloat16, ""),
        pytest.param(torch.float32, "rowwise", marks=pytest.mark.slow),
    ],
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
