"""A trainee that draws random numbers, its batches, and how many steps are looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tiny_lm import TinyLM, tokens
from torch import Tensor, nn
from torch.nn import functional

from harness.training import cuda_graph
from harness.training.setup import Setup, Trainee, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = cuda_graph.WARM_UP + 4


class Dropping(TinyLM):
    """With dropout, so that a step draws random numbers."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = functional.dropout(self.embedding(tokens), 0.2)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def trainee(make: Callable[[], nn.Module] = Dropping, **changes: Any) -> Trainee:
    """Trainee with the same weights on every call."""
    torch.manual_seed(0)
    model = make()
    made = Setup(**({"model": "tiny", "batch": 4, "seq": 8, "compute": "fp32", "graph": True} | changes))
    return prepare(made, "cpu", model.to(made.weight_dtype))


def batches(accumulation: int = 1, steps: int = STEPS) -> list[list[tuple[Tensor, ...]]]:
    return [[tokens(step * accumulation + i) for i in range(accumulation)] for step in range(steps)]
