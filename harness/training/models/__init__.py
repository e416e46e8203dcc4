"""The models by name, and how one is made.

A model is trained by `module(*batch) -> loss`, float32 and 0-dimensional. Ours take (tokens, targets), int64 [B, T].
To add one: its sizes and source in `models.yaml`; a new architecture is a file of its own and a line in `_KINDS`. From another
package, a `ModelSpec` by an entry point of the group `fp8_harness.models`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fp8core.extensions import ExtensionTable, of_type
from harness.store.errors import UsageError, unknown
from harness.store.tables import beside
from harness.training.models.common import WeightsFrom, materialise, share
from harness.training.models.llama import Llama, LlamaConfig, RopeScaling
from harness.training.models.llama_moe import LlamaMoe, MoeConfig
from harness.training.models.nanogpt import Gpt, GptConfig
from harness.training.models.user import UserModel, user_model
from harness.training.step import CHECKPOINTING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

__all__ = [
    "CHECKPOINTING",
    "MODELS",
    "ModelSpec",
    "UserModel",
    "WeightsFrom",
    "build",
    "resolve",
    "share",
]

Config = GptConfig | LlamaConfig
_KINDS: Mapping[str, tuple[type[Config], Callable[[Any, str], Gpt | Llama]]] = {
    "gpt": (GptConfig, Gpt),
    "llama": (LlamaConfig, Llama),
    "llama_moe": (MoeConfig, LlamaMoe),
}
_CLASSES = dict(_KINDS.values())


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
        weights: WeightsFrom = "host",
    ) -> nn.Module:
        """The model with its initial weights; see `build`."""
        if checkpointing not in CHECKPOINTING:
            raise unknown("activation checkpointing", checkpointing, CHECKPOINTING)
        if layers is not None and not 1 <= layers <= self.layers:
            raise UsageError(
                f"layers={layers}: {self.name} has {self.layers} blocks; expected 1 to {self.layers}"
            )
        sizes = {"layers": layers, "vocab_size": vocab_size}
        changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        config = dataclasses.replace(self.config, **changes)
        with torch.device("meta"):
            model = _CLASSES[type(config)](config, checkpointing).to(dtype)
        if torch.device(device).type != "meta":
            materialise(model, device, seed, model.init_std, weights)
        return model


_BY_NAME: dict[str, ModelSpec] = {}
for _name, _fields in beside(__file__, "models.yaml").items():
    ((_kind, _sizes),) = ((key, _fields.pop(key)) for key in _KINDS.keys() & _fields.keys())
    if "rope_scaling" in _sizes:
        _sizes["rope_scaling"] = RopeScaling(**_sizes["rope_scaling"])
    _BY_NAME[_name] = ModelSpec(_name, config=_KINDS[_kind][0](**_sizes), **_fields)


def _fault(name: str, made: object) -> str:
    """A model from outside is one of our architectures in other sizes; another one is trained by `model._target_=`."""
    if fault := of_type(ModelSpec)(name, made):
        return fault
    config = type(getattr(made, "config", None))
    known = ", ".join(each.__name__ for each in _CLASSES)
    return "" if config in _CLASSES else f"its config is of type {config.__name__}; expected one of {known}"


MODELS = ExtensionTable("models", _BY_NAME, _fault)


def build(model: ModelSpec | UserModel | str, **how: Any) -> nn.Module:
    """A model with its initial weights.

    Args:
        model: a spec, or what `resolve` takes.
        **how: some of these.
            device: "cpu" by default; "meta" leaves the weights out.
            dtype: of all parameters, float32 by default; the values are those of float32, rounded.
            seed: fixes every weight, on every device and in every dtype.
            layers: keep only that many blocks.
            vocab_size: instead of the spec's own.
            checkpointing: of activations, one of `CHECKPOINTING`.
            weights: "host" draws them on the CPU, the same for every device; "device" on the device, in a hundredth of
                the time, the same for every device of its kind; "none" leaves them undefined, for who puts in others.

    Raises:
        UsageError: an unknown model or value, or weights that do not fit on the device.
    """
    return (resolve(model) if isinstance(model, str) else model).build(**how)


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
            own = f"; a class or function of yours: model._target_={text}" if "." in text else ""
            raise UsageError(f"{unknown('model', text, MODELS)}{own}")
        return MODELS[text]
    try:
        return user_model(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"model={text!r} is no JSON mapping: {error}") from error
