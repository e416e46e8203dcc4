"""A model of transformers on "meta": its matrices, read off the module. No weight is allocated, no code is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.training.models.hugging_face import EXPERTS, LINEAR, ROUTER, HfModel, Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.training.models.hugging_face import Fields

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_ONE_OF_MANY = re.compile(r"\bexperts\.\d+\.")
_STORED = (
    "quantization_config",
    "dtype",
    "torch_dtype",
    "auto_map",
)  # how weights are stored, no part of the model


def installed() -> bool:
    """Whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def parts_of(fields: Fields, name: str) -> HfModel:
    """The model as transformers builds it; raises what transformers raises."""
    transformers = importlib.import_module("transformers")  # without types of its own
    values = {key: value for key, value in fields.values.items() if key not in (*_STORED, "model_type")}
    config = transformers.AutoConfig.for_model(fields.model_type, **values)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    return read_off(module, config, name)


def read_off(module: nn.Module, config: Any, name: str) -> HfModel:
    """The matrices of a module, Conv1D and experts in one tensor among them."""
    parts: dict[str, Part] = {}
    for part in _matrices(module, int(config.hidden_size)):
        before = parts.get(part.name)
        count = part.count + (before.count if before else 0)
        parts[part.name] = Part(part.name, part.K, part.N, part.kind, count)
    routed = any(part.kind == EXPERTS for part in parts.values())
    return HfModel(
        name,
        tuple(parts.values()),
        sum(p.numel() for p in module.parameters()),
        int(config.num_hidden_layers),
        int(config.num_experts_per_tok) if routed else 0,
        getattr(config, "max_position_embeddings", None),
    )


def _matrices(module: nn.Module, hidden: int) -> Iterator[Part]:
    for fqn, part in module.named_modules():
        word = fqn.rsplit(".", 1)[-1]
        weight = getattr(part, "weight", None)
        if isinstance(part, nn.Linear):
            merged = _ONE_OF_MANY.sub("experts.", fqn)
            kind = EXPERTS if merged != fqn else ROUTER if word in _ROUTERS else LINEAR
            yield Part(merged, part.in_features, part.out_features, kind)
        elif type(part).__name__ == "Conv1D" and isinstance(weight, nn.Parameter):
            yield Part(fqn, weight.shape[0], weight.shape[1])
        elif word in _ROUTERS and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            yield Part(fqn, weight.shape[1], weight.shape[0], ROUTER)
        elif word == "experts":
            yield from _grouped(fqn, part, hidden)


def _grouped(fqn: str, experts: nn.Module, hidden: int) -> Iterator[Part]:
    """Experts in one tensor [experts, a, b], which lies either way round: what reads the stream has `hidden` inputs."""
    for key, weight in experts.named_parameters(recurse=False):
        if weight.dim() == 3:
            count, one, two = weight.shape
            other = two if one == hidden else one
            K, N = (other, hidden) if key.startswith("down") else (hidden, other)
            yield Part(f"{fqn}.{key}", K, N, EXPERTS, count)
