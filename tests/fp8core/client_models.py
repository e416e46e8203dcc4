"""Small twins of modules that clients bring: GPT-2's Conv1D, transformers' experts and router, a GPT-2 and a mixture.

Written after transformers 5 (`pytorch_utils.Conv1D`, `models/gpt2`, `models/qwen3_moe`, `integrations/moe.py`), so that
the default suite needs no transformers.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Attention(nn.Module):
    """GPT-2's attention; `plain` multiplies scores and values by itself, as attn_implementation="eager" does."""

    def __init__(self, width: int, heads: int, plain: bool) -> None:
        super().__init__()
        self.heads, self.plain = heads, plain
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        if self.plain:
            scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
            mask = torch.full(scores.shape[-2:], float("-inf")).triu(1)
            mixed = functional.dropout((scores + mask).softmax(-1), 0.1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Gpt2(nn.Module):
    """model(tokens) is the loss; the head shares the embedding's weight."""

    def __init__(
        self, width: int = 64, heads: int = 4, layers: int = 2, vocab: int = 256, plain: bool = False
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln": nn.LayerNorm(width),
                    "attn": Attention(width, heads, plain),
                    "c_fc": Conv1D(4 * width, width),
                    "c_proj": Conv1D(width, 4 * width),
                }
            )
            for _ in range(layers)
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = x + block["attn"](block["ln"](x))
            x = x + block["c_proj"](functional.gelu(block["c_fc"](x)))
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), tokens.flatten())


class Router(nn.Module):
    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = functional.linear(x, self.weight).softmax(-1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """transformers' interface: stacked parameters, attributes that say how they lie, forward by a loop over experts."""

    def __init__(
        self, width: int, ffn: int, experts: int, top_k: int, transposed: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.linear = experts, nn.SiLU(), functional.linear
        self.config = SimpleNamespace(num_experts_per_tok=top_k)
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, bias, transposed, True
        sizes = ((2 * ffn, width), (width, ffn))
        up, down = (pair[::-1] if transposed else pair for pair in sizes)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, *up) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, *down) / ffn**0.5)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * ffn))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, width))

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for e in range(self.num_experts):
            tokens, place = torch.where(top_k_index == e)
            up, down = self.gate_up_proj[e], self.down_proj[e]
            up, down = (up.t(), down.t()) if self.is_transposed else (up, down)
            biases = (self.gate_up_proj_bias[e], self.down_proj_bias[e]) if self.has_bias else (None, None)
            hidden = self.linear(x[tokens], up, biases[0])
            y = self.linear(self._apply_gate(hidden), down, biases[1])
            result = result.index_add(0, tokens, y * top_k_weights[tokens, place, None])
        return result


class Mixture(nn.Module):
    """model(x) [T, width] -> the same; the router's choice stays that of the unconverted model."""

    def __init__(self, width: int = 64, ffn: int = 32, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = Router(width, experts, top_k)
        self.experts = Experts(width, ffn, experts, top_k)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        return self.out(self.experts(x, chosen, weights))
