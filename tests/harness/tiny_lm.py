"""A language model of a few thousand weights, for tests of training that need no real one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 65  # as the character set of nanoGPT: a head that FP8 matmul can't take
WIDTH, HIDDEN = 32, 64


class TinyLM(nn.Module):
    """Embedding, one MLP with a norm and a bias, and a head; `model(tokens, targets)` is the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.dropout:
            x = functional.dropout(x, self.dropout, self.training)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def tiny_lm(dtype: torch.dtype = torch.float32, seed: int = 0) -> TinyLM:
    """The same weights on every call."""
    torch.manual_seed(seed)
    return TinyLM().to(dtype)


def tokens(step: int, batch: int = 4, seq: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [batch, seq]; the same on every call."""
    generator = torch.Generator().manual_seed(1000 + step)
    text = torch.randint(VOCABULARY, (batch, seq + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
