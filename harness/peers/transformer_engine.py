"""transformer_engine: NVIDIA's layers, with cuBLASLt products and casts of their own.

Recipes by our names, as its documentation advises each: delayed (`DelayedScaling`), tensorwise
(`Float8CurrentScaling`), blockwise (`Float8BlockScaling`), mxfp8 (`MXFP8BlockScaling`); e5m2 gradients for the first two.
Eager only: its kernels are opaque to torch.compile, which would break the graph at every layer.

Written after the interface of 2.x (`autocast`, before 2.9 `fp8_autocast`); names read 2026-11-21 in
NVIDIA/TransformerEngine, `transformer_engine/pytorch/quantization.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.peers.peer import Peer, import_missing

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

MODULE = "transformer_engine.pytorch"
PIP = "transformer_engine[pytorch]"
# Our name of a recipe: the class of theirs, and the function that says whether this GPU runs it
_RECIPES = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "tensorwise": ("Float8CurrentScaling", "is_fp8_available"),
    "blockwise": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
}


class EngineLinear(nn.Module):
    """A `transformer_engine.pytorch.Linear` that always runs in its recipe and shares the given layer's parameters."""

    def __init__(self, layer: nn.Linear, recipe: str) -> None:
        super().__init__()
        engine, recipes = _modules()
        self.recipe = getattr(recipes, _RECIPES[recipe][0])()
        self.inner = engine.Linear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=layer.weight.dtype,
            device="meta",
        )
        self.inner.weight = layer.weight
        if layer.bias is not None:
            self.inner.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """[N, K], in high precision."""
        weight: Tensor = self.inner.weight
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias` with FP8 products in both passes."""
        with _autocast(self.recipe):
            output: Tensor = self.inner(input)
        return output


def _modules() -> tuple[Any, Any]:
    return importlib.import_module(MODULE), importlib.import_module("transformer_engine.common.recipe")


def _autocast(recipe: Any) -> AbstractContextManager[None]:
    engine, _ = _modules()
    if hasattr(engine, "autocast"):
        return engine.autocast(enabled=True, recipe=recipe)
    return engine.fp8_autocast(enabled=True, fp8_recipe=recipe)


def missing(device: str) -> str | None:
    """An NVIDIA GPU, and more than the meta package, which installs without a GPU and imports nothing."""
    absent = import_missing(MODULE, PIP)
    if absent is None and torch.device(device).type != "cuda":
        return f"Transformer Engine runs on NVIDIA GPUs, not on {device}"
    return absent


def unfit(recipe: str, device: str) -> str | None:
    """What Transformer Engine itself says of the recipe on this GPU; releases without the question are tried."""
    engine, _ = _modules()
    ask = getattr(engine, _RECIPES[recipe][1], None)
    if ask is None:
        return None
    there, why = ask(return_reason=True)
    return None if there else f"Transformer Engine {version()} has no {recipe} here: {why}"


def version() -> str:
    """Of the installed wheel."""
    return importlib.metadata.version("transformer_engine")


PEER = Peer(
    arm="te",
    doc="transformer_engine.pytorch.Linear",
    missing=missing,
    version=version,
    recipes=tuple(_RECIPES),
    modes=("eager",),
    linear=EngineLinear,
    unfit=unfit,
    operators=False,
)
