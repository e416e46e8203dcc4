"""GPT-2 as nanoGPT trains it: learned positions, pre-LayerNorm blocks, GELU, one matrix for embedding and head.

    x = embedding[tokens] + positions
    x = x + proj(attention(qkv(norm(x))))        for each block
    x = x + down(gelu(up(norm(x))))
    logits = norm(x) @ embedding.T

Sizes and initialisation: Radford et al. 2019, section 2.3; karpathy/nanoGPT, model.py and README. The fused q, k, v
matrix, biases in all layers or in none, GELU by erf, epsilon 1e-5 and dropout places are nanoGPT's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.training.models.common import (
    CausalAttention,
    mean_cross_entropy,
    residual_std,
    run_block,
)


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Sizes of a GPT. `bias`: in linear layers and norms (GPT-2 True; nanoGPT's own trainings False)."""

    vocab_size: int
    max_seq: int
    layers: int
    heads: int
    width: int
    bias: bool = False
    dropout: float = 0.0


class Gpt(nn.Module):
    """A GPT; see the module docstring.

    `forward(tokens, targets)`: tokens and targets int64 [B, T]. With targets the mean cross-entropy, float32,
    0-dimensional; without them the logits [B, T, V].
    """

    def __init__(self, config: GptConfig, checkpointing: str = "none") -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_seq, config.width)
        self.layers = nn.ModuleList(GptBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def init_std(self, name: str) -> float:
        """Standard deviation of the initial matrix of that name."""
        return residual_std(name, ("attention.proj.weight", "mlp.down.weight"), self.config.layers)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """See the class."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(place)
        x = functional.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = run_block(self.checkpointing, layer, x)
        logits = self.head(self.norm(x))
        return logits if targets is None else mean_cross_entropy(logits, targets)


class GptBlock(nn.Module):
    """Attention and MLP, each added to the residual stream [B, T, width]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = GptAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = GptMlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GptAttention(nn.Module):
    """Multi-head causal self-attention with one matrix for q, k and v."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.attend = CausalAttention(config.heads, config.width // config.heads, config.dropout)
        self.proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> the same."""
        q, k, v = (
            part.unflatten(-1, (self.attend.heads, -1)) for part in self.qkv(x).chunk(3, dim=-1)
        )  # each [B, T, heads, head_dim]
        return functional.dropout(self.proj(self.attend(q, k, v)), self.dropout, self.training)


class GptMlp(nn.Module):
    """width -> 4 width -> GELU -> width."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> the same."""
        return functional.dropout(self.down(functional.gelu(self.up(x))), self.dropout, self.training)
