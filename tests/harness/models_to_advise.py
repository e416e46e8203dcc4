"""Modules for the tests of `harness.advise`: named on its command line as a user's own would be."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two layers that read one tensor, and one that reads their product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)).float().mean()


class Peeks(nn.Module):
    """Looks at a value in the middle of its second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), Chooses()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().mean()


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum().item() > 0 else x


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Named(nn.Module):
    """Layers whose names are not what one expects."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("[red]a[/red]", "b'c", "</script>", "x*y,z"):
            self.add_module(name, nn.Linear(4096, 4096, bias=False))
            self.add_module(f"{name} small", nn.Linear(16, 16, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.children():
            total = total + layer(x[..., : layer.in_features]).float().mean()
        return total


def mlp(width: int = 4096) -> nn.Module:
    return Mlp(width)


def mlp_batch(step: int, seed: int, batch_size: int, device: str, width: int = 4096) -> tuple[Tensor, ...]:
    return (torch.zeros(batch_size, 512, width, device=device, dtype=torch.bfloat16),)


def peeks() -> nn.Module:
    return Peeks()


def small_batch(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    return (torch.zeros(batch_size, 64, 16, device=device, dtype=torch.bfloat16),)


def named() -> nn.Module:
    return Named()


def named_batch(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    return (torch.zeros(batch_size, 512, 4096, device=device, dtype=torch.bfloat16),)


class Pooled(nn.Module):
    """A body that sees each of 64 patches and a head that sees their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1024, 4096, bias=False)
        self.back = nn.Linear(4096, 1024, bias=False)
        self.head = nn.Linear(1024, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.body(x)).mean(dim=1)).float().mean()


def pooled() -> nn.Module:
    return Pooled()


def patches(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    return (torch.zeros(batch_size, 64, 1024, device=device, dtype=torch.bfloat16),)


def pixels(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    """Whole numbers that are no ids of tokens."""
    return (torch.zeros(batch_size, 64, 1024, device=device, dtype=torch.uint8),)


class FromPixels(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


def from_pixels() -> nn.Module:
    return FromPixels()


class Pairs(nn.Module):
    """Each sequence of a batch against each: rows that grow with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(1024, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(dim=1)
        return self.score(x[:, None] * x).float().mean()


def pairs() -> nn.Module:
    return Pairs()


class NoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).float().mean()


def no_linear() -> nn.Module:
    return NoLinear()
