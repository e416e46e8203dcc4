"""Stands in for transformers where it is not installed: the names that docs/tutorial-measure-my-model.md and `config.json` files use.

Interface as of transformers 5: a configuration by keywords, `from_config` of the Auto class, a causal LM whose output has
`loss` where there are labels. tests/clients runs the same with the real one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import language_models
import torch
from torch import nn


class LlamaConfig(language_models.Config):
    """Takes the sizes that the stand-in needs, and ignores the others."""

    def __init__(self, vocab_size: int = 32000, max_position_embeddings: int = 2048, **sizes: Any) -> None:
        super().__init__(vocab_size, max_position_embeddings)


class LlamaForCausalLM(language_models.TinyForCausalLM):
    """By its name a causal LM."""


class Conv1D(nn.Module):
    """Its weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))


class Experts(nn.Module):
    """Experts of one tensor; GPT-OSS's lie the other way round."""

    def __init__(self, count: int, hidden: int, ffn: int, *, turned: bool = False) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        for name, shape in shapes.items():
            weight = torch.empty(count, *(reversed(shape) if turned else shape))
            self.register_parameter(name, nn.Parameter(weight))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))


def _linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def _llama(c: Any) -> nn.Module:
    """A block of Llama's or Mixtral's matrices."""
    hidden, ffn, kv = c.hidden_size, c.intermediate_size, c.hidden_size // c.num_attention_heads
    kv *= c.num_key_value_heads
    attention = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    count = getattr(c, "num_local_experts", 0)
    mlp: dict[str, nn.Module] = {
        "gate_proj": _linear(hidden, ffn),
        "up_proj": _linear(hidden, ffn),
        "down_proj": _linear(ffn, hidden),
    }
    if count:
        mlp = {"gate": _linear(hidden, count), "experts": Experts(count, hidden, ffn)}
    parts = {"self_attn": {name: _linear(hidden, n) for name, n in attention.items()}, "mlp": mlp}
    return nn.ModuleDict({name: nn.ModuleDict(own) for name, own in parts.items()})


def _gpt2(c: Any) -> nn.Module:
    n = c.n_embd
    parts = {
        "attn": {"c_attn": Conv1D(3 * n, n), "c_proj": Conv1D(n, n)},
        "mlp": {"c_fc": Conv1D(4 * n, n), "c_proj": Conv1D(n, 4 * n)},
    }
    return nn.ModuleDict({name: nn.ModuleDict(own) for name, own in parts.items()})


_BLOCKS = {
    "llama": ("model", "layers", _llama),
    "mixtral": ("model", "layers", _llama),
    "gpt2": ("transformer", "h", _gpt2),
}


class AutoConfig:
    """A configuration of a named type."""

    @classmethod
    def for_model(cls, model_type: str, **fields: Any) -> Any:
        """The fields; those of GPT-2 by their common names too; of "tiny" those of a model that trains."""
        if model_type == "tiny":
            return LlamaConfig(**fields)
        if model_type not in _BLOCKS:
            raise ValueError(f"Unrecognized model identifier: {model_type}")
        if model_type == "gpt2":
            common = {
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "max_position_embeddings": "n_positions",
            }
            fields |= {name: fields[own] for name, own in common.items()}
        return SimpleNamespace(model_type=model_type, **fields)


class AutoModelForCausalLM:
    """Chooses the class by the configuration's."""

    @classmethod
    def from_config(cls, config: Any) -> nn.Module:
        """An untrained model; one of AutoConfig's has matrices alone."""
        if isinstance(config, LlamaConfig):
            return LlamaForCausalLM(config)
        body, layers, block = _BLOCKS[config.model_type]
        blocks = nn.ModuleList(block(config) for _ in range(config.num_hidden_layers))
        parts = {
            body: nn.ModuleDict({layers: blocks}),
            "lm_head": _linear(config.hidden_size, config.vocab_size),
        }
        module = nn.ModuleDict(parts)
        module.config = config
        return module
