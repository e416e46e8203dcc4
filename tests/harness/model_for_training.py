"""A model and batch functions as a user brings them by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = 16


class Regression(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(width, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(torch.relu(self.hidden(x))) - y).square().mean().float()


class Copies(Regression):
    """Brings a number from the host in each pass."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * torch.tensor(2.0, device=x.device)


class Odd(nn.Module):
    """Nothing that FP8 could multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.narrow(x) - y[:, :10]).square().mean().float()


def copies() -> Copies:
    return Copies(32)


def odd() -> Odd:
    return Odd()


def build(width: int = 32) -> Regression:
    return Regression(width)


def batch(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed * 10**9 + step)
    x = torch.randn(batch_size, 32, generator=random)
    return x.to(device), (2 * x[:, :16]).to(device)


def wrong(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    return (torch.ones(batch_size + 1, 32),)


def unseeded(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(batch_size, 32)
    return x.to(device), (2 * x[:, :16]).to(device)


def fails(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    raise FileNotFoundError("no data today")
