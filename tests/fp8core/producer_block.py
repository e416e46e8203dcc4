"""A block of producers and the layers that take their codes."""

from __future__ import annotations

import pytest
import torch
from recipes import on_cpu
from torch import nn

from fp8core import (
    Float8Linear,
    RMSNorm,
    SwiGLU,
    cast_input,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Block(nn.Module):
    """Norm, two projections that share its result, activation, projection; fused or not."""

    def __init__(self, name: str, fused: bool, kernels: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        recipe = on_cpu(name).with_kernels(kernels)
        self.fused = fused
        self.norm, self.act = RMSNorm(32, dtype=dtype), SwiGLU()
        self.gate, self.up = (Float8Linear(32, 48, bias=False, dtype=dtype, config=recipe) for _ in "gu")
        self.down = Float8Linear(48, 32, bias=False, dtype=dtype, config=recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fused:
            h = cast_input(
                self.norm(x), self.gate, self.up
            )  # once, so that gradients add up alike under autocast
            return self.down(self.act(self.gate(h), self.up(h)))
        h = self.norm(x, self.gate, self.up)
        return self.down(self.act(self.gate(h), self.up(h), self.down))
