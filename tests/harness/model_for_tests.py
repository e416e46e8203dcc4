"""A model that the tests of `shapes=from_model` name by `model._target_=model_for_tests.mlp`."""

from __future__ import annotations

from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Mlp(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))


def mlp(width: int = 16, blocks: int = 3) -> nn.Module:
    return Mlp(width, blocks)
