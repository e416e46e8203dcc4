"""The two commonest language models as their users have them: nanoGPT's form, and a stand-in with Hugging Face's.

Neither returns the bare loss. Written anew for the tests; what they share with the originals is the interface:
`forward(idx, targets=None) -> (logits, loss)` (karpathy/nanoGPT, model.py), and `forward(input_ids, attention_mask,
labels, ...) -> ModelOutput` with shifted labels, `loss` None without them (transformers, modeling_outputs.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, LONGEST = 64, 32, 32


@dataclass
class Config:
    vocab_size: int = VOCAB
    block_size: int = LONGEST

    @property
    def max_position_embeddings(self) -> int:
        return self.block_size


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab_size, WIDTH), nn.Embedding(config.block_size, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return x + self.down(functional.gelu(self.up(x)))


class GPT(nn.Module):
    """nanoGPT's form."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.transformer = config, Body(config)
        self.lm_head = nn.Linear(WIDTH, config.vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(self.transformer(idx))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ModelOutput(OrderedDict[str, Any]):
    """Keys as attributes; those that are None are attributes alone, as in transformers."""

    def __init__(self, loss: Tensor | None, logits: Tensor) -> None:
        super().__init__({k: v for k, v in (("loss", loss), ("logits", logits)) if v is not None})
        self.loss, self.logits = loss, logits


class TinyForCausalLM(nn.Module):
    """Hugging Face's form."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.model = config, Body(config)
        self.lm_head = nn.Linear(WIDTH, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> ModelOutput:
        assert input_ids is not None
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return ModelOutput(loss, logits)


class TinyForClassification(TinyForCausalLM):
    """Labels are not tokens here."""


class WithoutLength(GPT):
    """A configuration that says no length."""

    def __init__(self) -> None:
        super().__init__(Config())
        self.config = {"vocab_size": VOCAB}  # type: ignore[assignment]


def gpt() -> GPT:
    return GPT(Config())


def tiny() -> TinyForCausalLM:
    return TinyForCausalLM(Config())


def counting(step: int, seed: int, batch_size: int) -> Tensor:
    """Each token is the one before it plus one: a loss that falls."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return (torch.randint(VOCAB, (batch_size, 1), generator=generator) + torch.arange(17)) % VOCAB


def in_order(step: int, seed: int, batch_size: int, device: str) -> tuple[Tensor, Tensor]:
    tokens = counting(step, seed, batch_size).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def by_name(step: int, seed: int, batch_size: int, device: str) -> dict[str, Tensor]:
    tokens = counting(step, seed, batch_size)[:, :16].to(device)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def without_labels(step: int, seed: int, batch_size: int, device: str) -> dict[str, Tensor]:
    return {"input_ids": counting(step, seed, batch_size)[:, :16].to(device)}


def one_tensor(step: int, seed: int, batch_size: int, device: str) -> Tensor:
    return counting(step, seed, batch_size)[:, :16].to(device)
