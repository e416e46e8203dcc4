"""Experts against a loop over tokens, in float64, and the grouped products against torch's own checks of operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
