"""Small models and error measures that the tests of distributed training share; importable by every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8core import Float8LinearConfig, Recipe, convert_to_float8_training

if TYPE_CHECKING:
    pass

Config = Recipe | Float8LinearConfig | str | None


class Mlp(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, dim: int = 32, hidden: int = 64, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm, MLP, residual."""

    def __init__(self, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def blocks(count: int, config: Config, dim: int = 32, hidden: int = 64) -> nn.Sequential:
    """The same weights on each rank; converted unless config is None."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dim, hidden) for _ in range(count)))
    if config is not None:
        convert_to_float8_training(model, config=config)
    return model


def mlp(config: Config, bias: bool = True, dim: int = 32, hidden: int = 64) -> nn.Module:
    """Likewise."""
    torch.manual_seed(0)
    model = Mlp(dim, hidden, bias)
    return model if config is None else convert_to_float8_training(model, config=config)


def whole(x: torch.Tensor | None) -> torch.Tensor:
    """What a DTensor is a part of."""
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, L2 in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full gradient of every parameter."""
    return {name: whole(p.grad) for name, p in model.named_parameters()}
