"""The models by name, and how one is made.

A model is trained by `module(*batch) -> loss`, float32 and 0-dimensional. Ours take (tokens, targets), int64 [B, T].
To add one: a configuration in `MODELS`; a new architecture is a file of its own and a line in `_CLASSES`. From another
package, a `ModelSpec` by an entry point of the group `fp8_harness.models`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fp8core.extensions import Table, of_type
from harness.store.errors import UsageError, unknown
from harness.training.models.common import (
    CHECKPOINTING,
    Weights,
    check_checkpointing,
    materialise,
    plain_attention,
    share,
)
from harness.training.models.llama import Llama, LlamaConfig, RopeScaling
from harness.training.models.llama_moe import LlamaMoe, MoeConfig
from harness.training.models.nanogpt import Gpt, GptConfig
from harness.training.models.user import UserModel, user_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

__all__ = [
    "CHECKPOINTING",
    "MODELS",
    "ModelSpec",
    "UserModel",
    "Weights",
    "build",
    "plain_attention",
    "resolve",
    "share",
]

Config = GptConfig | LlamaConfig

_CLASSES: Mapping[type, Callable[[Any, str], Gpt | Llama]] = {
    GptConfig: Gpt,
    LlamaConfig: Llama,
    MoeConfig: LlamaMoe,
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named model.

    Attributes:
        name: its key in `MODELS`.
        doc: one line.
        source: where its sizes are published; "no published model" otherwise.
        config: its sizes.
        parameters: published number of parameters; None where none is published.
        batch: None: its batches come from a corpus.
    """

    name: str
    doc: str
    source: str
    config: Config
    parameters: int | None = None
    batch: None = None

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the published model; a corpus may bring its own."""
        return self.config.vocab_size

    @property
    def max_seq(self) -> int:
        """Longest sequence in tokens."""
        return self.config.max_seq

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.config.width

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self.config.layers

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        layers: int | None = None,
        vocab_size: int | None = None,
        checkpointing: str = "none",
        weights: Weights = "host",
    ) -> nn.Module:
        """The model with its initial weights; see `build`."""
        check_checkpointing(checkpointing)
        changes: dict[str, Any] = {}
        if layers is not None:
            if not 1 <= layers <= self.layers:
                raise UsageError(
                    f"layers={layers}: {self.name} has {self.layers} blocks; expected 1 to {self.layers}"
                )
            changes["layers"] = layers
        if vocab_size is not None:
            if vocab_size < 1:
                raise UsageError(f"vocab_size={vocab_size}; expected at least 1")
            changes["vocab_size"] = vocab_size
        config = dataclasses.replace(self.config, **changes)
        with torch.device("meta"):
            model = _CLASSES[type(config)](config, checkpointing).to(dtype)
        if torch.device(device).type != "meta":
            materialise(model, device, seed, model.init_std, weights)
        return model


_GPT2 = (
    "Radford et al. 2019, table 2, vocabulary 50257; parameters as counted in huggingface.co/openai-community"
)
_LLAMA2 = "arXiv:2307.09288; config.json of meta-llama/Llama-2-7b-hf"
_LLAMA3 = "arXiv:2407.21783 table 3; config.json of meta-llama/Meta-Llama-3-"
_LLAMA32 = "config.json of meta-llama/Llama-3.2-"
_OURS = "no published model"


def _gpt2(layers: int, heads: int, width: int) -> GptConfig:
    return GptConfig(50257, 1024, layers, heads, width, bias=True)


def _llama3(layers: int, width: int, heads: int, ffn: int, **other: Any) -> LlamaConfig:
    base = LlamaConfig(128256, 8192, layers, width, heads, 8, ffn)
    return dataclasses.replace(base, **other)


_BY_NAME: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            "nano", "2 blocks of width 48 for bytes; seconds on a CPU", _OURS, GptConfig(256, 256, 2, 3, 48)
        ),
        ModelSpec(
            "nanogpt_char_cpu",
            "nanoGPT's character setting for a CPU: 4 blocks of width 128, block 64, no dropout",
            "karpathy/nanoGPT, README, 'I only have a macbook'",
            GptConfig(65, 64, 4, 4, 128),
        ),
        ModelSpec(
            "nanogpt_char",
            "nanoGPT's character setting for a GPU: 6 blocks of width 384, block 256, dropout 0.2",
            "karpathy/nanoGPT, config/train_shakespeare_char.py",
            GptConfig(65, 256, 6, 6, 384, dropout=0.2),
        ),
        ModelSpec("gpt2", "GPT-2 124M", _GPT2, _gpt2(12, 12, 768), 124_439_808),
        ModelSpec("gpt2_medium", "GPT-2 355M", _GPT2, _gpt2(24, 16, 1024), 354_823_168),
        ModelSpec("gpt2_large", "GPT-2 774M", _GPT2, _gpt2(36, 20, 1280), 774_030_080),
        ModelSpec("gpt2_xl", "GPT-2 1.5B", _GPT2, _gpt2(48, 25, 1600), 1_557_611_200),
        ModelSpec(
            "llama_tiny",
            "2 blocks of width 64 with 4 query and 2 key heads, for bytes; seconds on a CPU",
            _OURS,
            LlamaConfig(256, 256, 2, 64, 4, 2, 176),
        ),
        ModelSpec(
            "llama_125m",
            "Llama 3 at GPT-2's size: 12 blocks of width 768, vocabulary 32000, tied head",
            _OURS,
            LlamaConfig(32000, 2048, 12, 768, 12, 4, 3072, tied=True),
        ),
        ModelSpec(
            "llama2_7b",
            "Llama 2 7B",
            _LLAMA2,
            LlamaConfig(32000, 4096, 32, 4096, 32, 32, 11008, theta=10000.0),
            6_738_415_616,
        ),
        ModelSpec(
            "llama3_1b",
            "Llama 3.2 1B, tied head",
            _LLAMA32 + "1B",
            _llama3(16, 2048, 32, 8192, tied=True, max_seq=131072, rope_scaling=RopeScaling(32.0)),
            1_235_814_400,
        ),
        ModelSpec(
            "llama3_3b",
            "Llama 3.2 3B, tied head",
            _LLAMA32 + "3B",
            _llama3(28, 3072, 24, 8192, tied=True, max_seq=131072, rope_scaling=RopeScaling(32.0)),
            3_212_749_824,
        ),
        ModelSpec(
            "llama_7b",
            "the '7B Llama-3' of the guide 'Turn on FP8 training'; its sizes are those of Llama 3 8B, at length 4096",
            "KempnerInstitute/KempnerForge, configs/train/7b_16gpu_fp8.toml",
            _llama3(32, 4096, 32, 14336, max_seq=4096),
        ),
        ModelSpec(
            "llama_13b",
            "KempnerForge's 13B, Llama 3's architecture",
            "KempnerInstitute/KempnerForge, benchmarks/weak_scaling_160gpu/README.md",
            _llama3(40, 5120, 40, 17920),
        ),
        ModelSpec("llama3_8b", "Llama 3 8B", _LLAMA3 + "8B", _llama3(32, 4096, 32, 14336), 8_030_261_248),
        ModelSpec("llama3_70b", "Llama 3 70B", _LLAMA3 + "70B", _llama3(80, 8192, 64, 28672), 70_553_706_496),
        ModelSpec(
            "llama3_405b",
            "Llama 3.1 405B",
            "arXiv:2407.21783 table 3; config.json of meta-llama/Llama-3.1-405B",
            _llama3(126, 16384, 128, 53248, max_seq=131072, rope_scaling=RopeScaling(8.0)),
            405_853_388_800,
        ),
        ModelSpec(
            "llama_moe_tiny",
            "llama_tiny with 4 experts, 2 a token",
            _OURS,
            MoeConfig(256, 256, 2, 64, 4, 2, 96, experts=4, top_k=2),
        ),
        ModelSpec(
            "llama_moe",
            "llama_125m with 8 experts of width 1536, 2 a token: as many active weights, 3.0 times as many in all",
            _OURS,
            MoeConfig(32000, 2048, 12, 768, 12, 4, 1536, tied=True, experts=8, top_k=2),
        ),
    )
}


def _fault(name: str, made: object) -> str:
    """A model from outside is one of our architectures in other sizes; another one is trained by `model._target_=`."""
    if fault := of_type(ModelSpec)(name, made):
        return fault
    config = type(getattr(made, "config", None))
    known = ", ".join(each.__name__ for each in _CLASSES)
    return "" if config in _CLASSES else f"its config is of type {config.__name__}; expected one of {known}"


MODELS = Table("models", _BY_NAME, _fault)


def build(
    model: ModelSpec | UserModel | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int | None = None,
    vocab_size: int | None = None,
    checkpointing: str = "none",
    weights: Weights = "host",
) -> nn.Module:
    """A model with its initial weights.

    Args:
        model: a spec, or what `resolve` takes.
        device: "meta" leaves the weights out.
        dtype: of all parameters; the values are those of float32, rounded.
        seed: fixes every weight, on every device and in every dtype.
        layers: keep only that many blocks.
        vocab_size: instead of the spec's own.
        checkpointing: of activations, one of `CHECKPOINTING`.
        weights: "host" draws them on the CPU, the same for every device; "device" on the device, in a hundredth of the
            time, the same for every device of its kind; "none" leaves them undefined, for who puts in others.

    Raises:
        UsageError: an unknown model or value, or weights that do not fit on the device.
    """
    spec = resolve(model) if isinstance(model, str) else model
    return spec.build(
        device=device,
        dtype=dtype,
        seed=seed,
        layers=layers,
        vocab_size=vocab_size,
        checkpointing=checkpointing,
        weights=weights,
    )


def resolve(text: str) -> ModelSpec | UserModel:
    """The model that the case axis `model` names.

    Args:
        text: a key of `MODELS`, or JSON of {"_target_": ..., "batch": ..., arguments of the target}.

    Raises:
        UsageError: an unknown name, or JSON that names no model.
        ExtensionError: the name is an extension's that cannot be used.
    """
    if not text.lstrip().startswith("{"):
        if text not in MODELS:
            raise unknown("model", text, MODELS)
        return MODELS[text]
    try:
        return user_model(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"model={text!r} is no JSON mapping: {error}") from error
