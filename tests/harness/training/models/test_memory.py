"""Predicted bytes against what autograd really saves and what the allocator really hands out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8core import convert_to_float8_training
from harness.training.models import build
from harness.training.models.memory import GIB, PARTS, fits, predict

BATCH, SEQ = 4, 32


def made(name: str, recipe: str | None, mode: str, device: str, **more: Any) -> nn.Module:
    model = build(name, device=device, checkpointing=mode, **more)
    return model if recipe is None else convert_to_float8_training(model, config=recipe)


class Summed(nn.Module):
    """The sum of what a model makes, as a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.inner(x).sum()
        return total


def tokens(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(BATCH, SEQ, dtype=torch.int64, device=device)
    return x, x.clone()


def test_casts_on_a_gpu_take_no_temporaries() -> None:
    """Oracle: by hand; one layer 1024 -> 1024 on 4096 rows: plain casts hold wider copies, the kernels only codes."""
    layer = convert_to_float8_training(nn.Sequential(nn.Linear(1024, 1024, bias=False)).bfloat16().to("meta"))
    rows = torch.empty(4096, 1024, device="meta", dtype=torch.bfloat16)
    plain, fused = (predict(Summed(layer), (rows,), device=device) for device in ("cpu", "cuda"))
    assert {part: plain[part] - fused[part] for part in PARTS if part != "workspace"} == dict.fromkeys(
        (part for part in PARTS if part != "workspace"), 0
    )
    assert plain["workspace"] - fused["workspace"] > rows.numel()


def test_fits() -> None:
    """Oracle: the sum; the message names the parts, and how much smaller a batch must be where one can help."""
    weights = {"weights": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB}
    parts = dict.fromkeys(PARTS, 0) | weights | {"activations": 10 * GIB}
    assert fits(parts, 18 * GIB) is None
    short, bound, hopeless = fits(parts, 12 * GIB), fits(weights, 6 * GIB), fits(parts, 6 * GIB)
    assert short is not None
    assert "18.00 GiB" in short
    assert "activations 10.00, optimizer 4.00" in short
    assert "2.5 times smaller" in short
    assert bound is not None
    assert "at least 8.00 GiB" in bound
    assert hopeless is not None
    assert "times smaller" not in hopeless  # no batch makes the weights fit
