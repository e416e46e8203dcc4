"""transformer_engine: NVIDIA's layers, with cuBLASLt products and casts of their own.

Recipes by our names, as its documentation advises each: delayed (`DelayedScaling`), tensorwise
(`Float8CurrentScaling`), blockwise (`Float8BlockScaling`), mxfp8 (`MXFP8BlockScaling`); e5m2 gradients for the first two.
Eager only: its kernels are opaque to torch.compile, which would break the graph at every layer.

A model's whole forward pass runs in one autocast, as its documentation has it: on leaving the outermost one it updates
the delayed scales of all layers that there are, and only the first layer within reduces those of the backward pass, so
that an autocast a layer would cost a model of L layers L updates of L. A layer alone opens its own.

Written after the interface of 2.x (`autocast`, before 2.9 `fp8_autocast`); names read 2026-11-21 in
NVIDIA/TransformerEngine, `transformer_engine/pytorch/quantization.py`, and the updates in `fp8.py` of 2024, its ancestor.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from harness.peers.peer import Peer, imported, needs

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass under way; `first` as `harness.peers.Peer.around` has it."""

    first: bool | None


_under_way: ContextVar[_Pass | None] = ContextVar("forward pass", default=None)


class EngineLinear(nn.Module):
    """A `transformer_engine.pytorch.Linear` that always runs in its recipe and shares the given layer's parameters."""

    def __init__(self, layer: nn.Linear, recipe: str) -> None:
        super().__init__()
        engine, _ = _modules()
        self.recipe = recipe
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
        whole = _under_way.get()
        output: Tensor
        if whole is not None:
            output = self.inner(input, is_first_microbatch=whole.first)
            return output
        with _autocast(self.recipe):
            output = self.inner(input)
        return output


@contextmanager
def around(recipe: str, first: bool | None) -> Iterator[None]:
    """One autocast for all layers of a forward pass; see `harness.peers.Peer`."""
    before = _under_way.set(_Pass(first))
    try:
        with _autocast(recipe):
            yield
    finally:
        _under_way.reset(before)


def _modules() -> tuple[Any, Any]:
    return imported(MODULE, PIP), imported("transformer_engine.common.recipe", PIP)


def _autocast(recipe: str) -> AbstractContextManager[None]:
    engine, recipes = _modules()
    theirs = getattr(recipes, _RECIPES[recipe][0])()
    if hasattr(engine, "autocast"):
        return engine.autocast(enabled=True, recipe=theirs)
    return engine.fp8_autocast(enabled=True, fp8_recipe=theirs)


def unfit(recipe: str, device: str) -> str | None:
    """What Transformer Engine itself says of the recipe on this GPU; releases without the question are tried."""
    engine, _ = _modules()
    ask = getattr(engine, _RECIPES[recipe][1], None)
    if ask is None:
        return None
    there, why = ask(return_reason=True)
    return None if there else f"Transformer Engine {version()} has no {recipe} here: {why}"


def version() -> str:
    """Version of the installed wheel."""
    return importlib.metadata.version("transformer_engine")


PEER = Peer(
    arm="te",
    doc="transformer_engine.pytorch.Linear",
    missing=needs("transformer_engine", PIP, "NVIDIA"),
    version=version,
    recipes=tuple(_RECIPES),
    modes=("eager",),
    linear=EngineLinear,
    around=around,
    unfit=unfit,
    operators=False,
)
