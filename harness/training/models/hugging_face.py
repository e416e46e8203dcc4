"""What a Hugging Face `config.json` says of a model's matrices: names, shapes, how many.

`transformers` builds the model on "meta", and its matrices are read off the module: no weight is allocated, no code is
downloaded. Of a model with pictures it is the part for text; what is left out is named.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.store.errors import UsageError, one_line
from harness.store.outside import from_json, read_text
from harness.training.models.llama import LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = "config.json"
LINEAR, ROUTER, EXPERTS = "linear", "router", "experts"
_SHARED = ({"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"}, {"gate_proj", "up_proj"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_ONE_OF_MANY = re.compile(r"\bexperts\.\d+\.")
# Their blocks are those of our Llama, but for biases and norms of q and k.
_LLAMAS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# How weights are stored, which is no part of the model.
_STORED = ("quantization_config", "dtype", "torch_dtype", "auto_map")


@dataclass(frozen=True, slots=True)
class ConfigMatrix:
    """A matrix that multiplies.

    Attributes:
        name: as transformers names it.
        K, N: input and output features.
        kind: "linear"; "router", which picks experts and stays in high precision; "experts", of which each token uses some.
        count: experts of this shape; else 1.
    """

    name: str
    K: int
    N: int
    kind: str = LINEAR
    count: int = 1

    @property
    def elements(self) -> int:
        """Weights of all its matrices."""
        return self.K * self.N * self.count

    @property
    def reads(self) -> str:
        """Name of the tensor that a part reads: the same for parts that read one tensor."""
        before, _, word = self.name.rpartition(".")
        group = next((str(i) for i, words in enumerate(_SHARED) if word in words), word)
        return f"{before}.{group}"


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model of a `config.json`.

    Attributes:
        name: the path that was given.
        parts: in the order of use.
        parameters: all weights.
        blocks: repeated ones.
        vocabulary: its tokens; None where the file doesn't say.
        top_k: experts that each token uses; 0 without experts.
        max_seq: longest sequence; None where the file doesn't say.
        like: our Llama of these sizes; None where the blocks are other ones.
        left_out: parts of the file beside the one for text, such as "vision".
    """

    name: str
    parts: tuple[ConfigMatrix, ...]
    parameters: int
    blocks: int
    vocabulary: int | None
    top_k: int = 0
    max_seq: int | None = None
    like: LlamaConfig | None = None
    left_out: tuple[str, ...] = ()


def is_config(text: str) -> bool:
    """Whether a person means a file or folder, and no name of a model."""
    return not text.lstrip().startswith("{") and (
        text.endswith(".json") or "/" in text or (Path(text) / FILE).is_file()
    )


def read(text: str) -> HfModel:
    """The model of a `config.json`, or of the folder that holds one.

    Raises:
        UsageError: no such file, no JSON mapping, transformers is not installed or cannot build it.
    """
    values, left_out = _values(text)
    try:
        with torch.device("meta"):
            module: Any = build(**values)
    except UsageError as error:
        raise UsageError(f"model={text}: {error}") from error
    like = _llama(module.config, str(values["model_type"]))
    return replace(read_off(module, text), like=like, left_out=left_out)


def as_values(text: str) -> dict[str, Any]:
    """What builds the model of a `config.json` anywhere, without that file: a function and the file's sizes.

    A row keeps this and no path. Keys that begin with "_" are left out: they say where a file lay.

    Raises:
        UsageError: no such file, or no JSON mapping.
    """
    values, _ = _values(text)
    return {"_target_": f"{__name__}.{build.__name__}"} | {k: v for k, v in values.items() if k[:1] != "_"}


def build(model_type: str, **values: Any) -> nn.Module:
    """A causal LM of transformers with weights drawn anew, on the default device.

    Args:
        model_type: as in a `config.json`, "llama".
        **values: the other keys of that file.

    Raises:
        UsageError: transformers is not installed, or cannot build it.
    """
    try:
        transformers = importlib.import_module("transformers")  # without types of its own
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UsageError(
            f"model_type {model_type!r}: transformers is not installed; in a checkout: pip install -e '.[hf]'"
        ) from None
    try:
        config = transformers.AutoConfig.for_model(model_type, **values)
        built: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises what it likes
        raise UsageError(
            f"transformers cannot build model_type {model_type!r}: {one_line(error)[:200]}"
        ) from error
    return built


def _values(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the file says of the model for text, and the names of other parts that it describes."""
    path = Path(text)
    path = path / FILE if path.is_dir() else path
    try:
        values = from_json(read_text(path))
    except OSError as error:
        raise UsageError(
            f"model={text}: cannot read {path}: {error.strerror}; expected a Hugging Face {FILE} or its folder"
        ) from error
    except ValueError as error:
        raise UsageError(f"model={text}: {path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"model={text}: {path} holds a {type(values).__name__}; expected a mapping")
    left_out = tuple(
        key.removesuffix("_config")
        for key, value in values.items()
        if key.endswith("_config") and key != "text_config" and isinstance(value, dict)
        if {"hidden_size", "model_type"} & value.keys()  # a model, and not how weights are stored
    )
    if isinstance(values.get("text_config"), dict):
        outer = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
        values = {"model_type": f"{values.get('model_type', '')}_text", **outer, **values["text_config"]}
    stored = values.get("quantization_config")
    if isinstance(stored, dict) and (stored.get("bits") == 4 or stored.get("load_in_4bit")):
        raise UsageError(
            f"{path}: its weights are stored in 4 bits (quantization_config), which are no Linear layers to train; take the "
            f"{FILE} of the model that it was made from"
        )
    kept = {key: value for key, value in values.items() if key not in _STORED}
    return {**kept, "model_type": str(values.get("model_type", ""))}, left_out


def _llama(config: Any, model_type: str) -> LlamaConfig | None:
    """Our Llama of the same sizes; None for other blocks, head sizes and attention."""
    width, heads = int(config.hidden_size), getattr(config, "num_attention_heads", 0)
    fits = model_type in _LLAMAS and (getattr(config, "head_dim", None) or width // heads) * heads == width
    if not fits or getattr(config, "sliding_window", None):
        return None
    return LlamaConfig(
        int(config.vocab_size),
        int(config.max_position_embeddings),
        int(config.num_hidden_layers),
        width,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        int(config.intermediate_size),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )


def read_off(module: nn.Module, name: str) -> HfModel:
    """The matrices of a module of transformers, Conv1D and experts in one tensor among them."""
    config: Any = module.config
    parts: dict[str, ConfigMatrix] = {}
    for part in _matrices(module, int(config.hidden_size)):
        before = parts.get(part.name)
        count = part.count + (before.count if before else 0)
        parts[part.name] = ConfigMatrix(part.name, part.K, part.N, part.kind, count)
    routed = any(part.kind == EXPERTS for part in parts.values())
    return HfModel(
        name,
        tuple(parts.values()),
        sum(p.numel() for p in module.parameters()),
        int(config.num_hidden_layers),
        getattr(config, "vocab_size", None),
        int(config.num_experts_per_tok) if routed else 0,
        getattr(config, "max_position_embeddings", None),
    )


def _matrices(module: nn.Module, hidden: int) -> Iterator[ConfigMatrix]:
    for fqn, part in module.named_modules():
        word = fqn.rsplit(".", 1)[-1]
        weight = getattr(part, "weight", None)
        if isinstance(part, nn.Linear):
            merged = _ONE_OF_MANY.sub("experts.", fqn)
            kind = EXPERTS if merged != fqn else ROUTER if word in _ROUTERS else LINEAR
            yield ConfigMatrix(merged, part.in_features, part.out_features, kind)
        elif type(part).__name__ == "Conv1D" and isinstance(weight, nn.Parameter):
            yield ConfigMatrix(fqn, weight.shape[0], weight.shape[1])
        elif word in _ROUTERS and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            yield ConfigMatrix(fqn, weight.shape[1], weight.shape[0], ROUTER)
        elif word == "experts":
            yield from _grouped(fqn, part, hidden)


def _grouped(fqn: str, experts: nn.Module, hidden: int) -> Iterator[ConfigMatrix]:
    """Experts in one tensor [experts, a, b], which lies either way round: what reads the stream has `hidden` inputs."""
    for key, weight in experts.named_parameters(recurse=False):
        if weight.dim() == 3:
            count, one, two = weight.shape
            other = two if one == hidden else one
            K, N = (other, hidden) if key.startswith("down") else (hidden, other)
            yield ConfigMatrix(f"{fqn}.{key}", K, N, EXPERTS, count)
