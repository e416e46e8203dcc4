"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    x = embedding[tokens]
    x = x + o(attention(rope(q(n)), rope(k(n)), v(n)))     for each block, n = norm(x)
    x = x + down(silu(gate(n)) * up(n))                                    n = norm(x)
    logits = head(norm(x))

q, k and v read one cast of their input, and so do gate and up, when they are Float8Linear of one recipe. Rotary
angles are made anew in each forward pass, in float32 outside of autocast's reach: the model has no buffers. Pairs of
a rotation are elements i and i + head_dim / 2, as in the published Hugging Face weights (Meta's own pair 2 i and
2 i + 1; the two differ by a permutation of the rows of q and k).

Sources: arXiv:2307.09288 (Llama 2), arXiv:2407.21783 (Llama 3), config.json of each published model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8core import CastInput, Float8Linear, SwiGLU
from harness.training.models.common import (
    CausalAttention,
    added_and_normed,
    mean_cross_entropy,
    normed,
    residual_std,
    run_block,
    share,
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretch of the slow rotations, so that a model trained on `original_seq` reads longer texts."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama. `tied`: embedding and head are one matrix."""

    vocab_size: int
    max_seq: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = False
    theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


class Llama(nn.Module):
    """A Llama; see the module docstring.

    `forward(tokens, targets)`: tokens and targets int64 [B, T]. With targets the mean cross-entropy, float32,
    0-dimensional; without them the logits [B, T, V].
    """

    def __init__(self, config: LlamaConfig, checkpointing: str = "none") -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(LlamaBlock(config, self.make_ffn(config)) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def make_ffn(self, config: LlamaConfig) -> nn.Module:
        """The second half of a block."""
        return SwiGlu(config.width, config.ffn)

    def init_std(self, name: str) -> float:
        """Standard deviation of the initial matrix of that name."""
        writes = ("attention.o.weight", "ffn.down.weight", "ffn.experts.down")
        return residual_std(name, writes, self.config.layers)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """See the class."""
        x = self.embedding(tokens)
        cos, sin = rotations(self.config, tokens.shape[1], tokens.device)
        for layer in self.layers:
            x = run_block(self.checkpointing, layer, x, cos, sin)
        logits = self.head(normed(self.norm, x, self.head))
        return logits if targets is None else mean_cross_entropy(logits, targets)


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each added to the residual stream [B, T, width]."""

    def __init__(self, config: LlamaConfig, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.attention = LlamaAttention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.ffn = ffn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, width] -> the same."""
        delta = self.attention(normed(self.attention_norm, x, *self.attention.readers), cos, sin)
        x, h = added_and_normed(self.ffn_norm, x, delta, *readers_of(self.ffn))
        return x + self.ffn(h)


class LlamaAttention(nn.Module):
    """Causal self-attention in which several query heads read one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.attend = CausalAttention(config.heads, config.head_dim)
        self.o = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    @property
    def readers(self) -> tuple[nn.Module, ...]:
        """The layers that read its input."""
        return self.q, self.k, self.v

    def forward(self, x: Tensor | CastInput, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, width], or its casts for `readers` -> [B, T, width]."""
        shared = share(x, *self.readers)
        q, k, v = (
            layer(shared).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v)
        )  # each [B, T, heads, head_dim]
        return self.o(self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v))


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Attributes:
        fused: fp8core's activation, which casts its result for `down`; None for PyTorch's.
    """

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.fused: SwiGLU | None = None
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    @property
    def readers(self) -> tuple[nn.Module, ...]:
        """The layers that read its input."""
        return self.gate, self.up

    def forward(self, x: Tensor | CastInput) -> Tensor:
        """[B, T, width], or its casts for `readers` -> [B, T, width]."""
        shared = share(x, *self.readers)
        gate, up = self.gate(shared), self.up(shared)
        if self.fused is None:
            return self.down(functional.silu(gate) * up)
        fp8 = isinstance(self.down, Float8Linear) and bool(self.down.recipe.fp8_gemms)
        return self.down(self.fused(gate, up, *((self.down,) if fp8 else ())))


def readers_of(ffn: nn.Module) -> tuple[nn.Module, ...]:
    """The Linear layers that read a feed-forward's input and nothing else does; () of one with a router."""
    return ffn.readers if isinstance(ffn, SwiGlu) else ()


def rotations(config: LlamaConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, float32 [T, 1, head_dim / 2]; the 1 stands for the heads."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies = torch.exp(exponents * -math.log(config.theta))
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = (positions[:, None] * frequencies)[:, None]
    return angles.cos(), angles.sin()


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divides by `factor` the frequencies that turn less than `low_freq_factor` times within `original_seq`.

    Those that turn more than `high_freq_factor` times stay; between them the two are mixed linearly in the number of
    turns (meta-llama/llama-models, apply_scaling).
    """
    turns = frequencies * (scaling.original_seq / (2 * math.pi))
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + head_dim / 2]) by their angles, in float32; x [B, T, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
