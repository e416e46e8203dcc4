"""Random tokens for a language model whose user names no batch function: enough for times and shapes, not for a loss.

Two kinds are recognised by their signature and configuration: a causal LM of Hugging Face, `forward(input_ids, ...,
labels)`, and nanoGPT's, `forward(idx, targets)` with an embedding of the vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.store.errors import UsageError

LONGEST = 1024  # tokens of a sequence, where the model takes more
NAMED = "model.batch=my.module.batch, a function batch(step, seed, batch_size, device)"
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of Hugging Face's class names
_TARGETS = ("targets", "target")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "block_size", "sequence_len", "max_seq_len", "max_seq", "context_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenInput:
    """What a language model reads.

    Attributes:
        keys: of the mapping that it takes; () for (tokens, targets) in order.
        vocab_size: tokens are drawn below it.
        seq: tokens of a sequence.
    """

    keys: tuple[str, ...]
    vocab_size: int
    seq: int

    @property
    def sentence(self) -> str:
        """The fact, as `resolved` and the console state it."""
        return f"random tokens below {self.vocab_size}, {self.seq} a sequence: times and shapes alone, no loss is judged"

    def batch(self, step: int, seed: int, batch_size: int, device: torch.device | str) -> Any:
        """Tokens, int64 [batch_size, seq], and their targets; the same for the same step and seed."""
        # The CPU's generator reads 32 bits of its seed and drops the others.
        random = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
        drawn = torch.randint(self.vocab_size, (batch_size, self.seq + 1), generator=random).to(device)
        tokens = drawn[:, :-1].contiguous()
        if self.keys:  # Hugging Face shifts the labels itself
            return dict.fromkeys(self.keys, tokens)
        return tokens, drawn[:, 1:].contiguous()


def token_input(module: nn.Module, target: str) -> TokenInput:
    """What a module reads, by its signature and configuration.

    Args:
        module: on "meta" will do.
        target: of the model, for the error.

    Raises:
        UsageError: it is neither kind, or its vocabulary or longest sequence cannot be told.
    """
    names = [name for name in inspect.signature(module.forward).parameters if name != "self"]
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    config = text() if callable(text) else config
    vocab = _number(config, "vocab_size")
    seq = next((value for name in _LENGTHS if (value := _number(config, name))), 0)
    first = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    keys: tuple[str, ...] = ()
    if {"input_ids", "labels"} <= set(names) and type(module).__name__.endswith(_CAUSAL):
        keys = ("input_ids", "labels")
    elif len(names) > 1 and names[1] in _TARGETS and first is not None:
        vocab = min(vocab or first.num_embeddings, first.num_embeddings)
    else:
        raise UsageError(
            f"model.batch is not named, and {target} reads no tokens that could be made up: its forward takes "
            f"({', '.join(names)}); name {NAMED}"
        )
    if not vocab or not seq:
        lacking = "vocab_size" if not vocab else f"longest sequence (none of {', '.join(_LENGTHS)})"
        raise UsageError(
            f"model.batch is not named, and the config of {target} has no {lacking}; name {NAMED}"
        )
    return TokenInput(keys, vocab, min(seq, LONGEST))


def _number(config: object, name: str) -> int:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0
