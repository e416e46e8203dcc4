"""One GPU's part of a model whose layers are split over several (tensor parallelism with sequence parallelism)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from harness.advise.plan import Exchange
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from harness.advise.model import Linear, Model, Traffic

# By the last word of a layer's name: split along its output (columns) or along its input (rows).
_HF_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "c_attn", "c_fc"}
COLUMNS = frozenset({"q", "k", "v", "qkv", "gate", "up", "head"} | _HF_COLUMNS)
ROWS = frozenset({"o", "down", "proj", "o_proj", "down_proj", "c_proj"})


def split(model: Model, tp: int) -> tuple[Model, tuple[Exchange, ...]]:
    """The part of one of `tp` GPUs, and the activations that go around the group in one forward pass.

    The pass has the tokens of the whole group. Between the products tokens are split too, so that what runs there
    is shared as well.

    Raises:
        UsageError: a layer whose name says neither, or sizes that `tp` does not divide.
    """
    layers = tuple(_split(layer, tp, model.name) for layer in model.layers)
    readers: dict[int, list[Linear]] = {}
    for layer in model.layers:
        if _word(layer) in COLUMNS:
            readers.setdefault(layer.input_id, []).append(layer)
    gathered = [
        Exchange(2.0 * g[0].tokens * g[0].K, tuple(la.fqn for la in g), True) for g in readers.values()
    ]
    scattered = [
        Exchange(2.0 * layer.tokens * layer.N, (layer.fqn,), False)
        for layer in model.layers
        if _word(layer) in ROWS
    ]
    part = replace(
        model,
        layers=layers,
        attention=model.attention / tp,
        other=model.other / tp,
        forward=_shared(model.forward, tp),
        backward=_shared(model.backward, tp),
        parameters=round(model.parameters / tp),
        in_linears=round(model.in_linears / tp),
        outside=None if model.outside is None else model.outside.scaled(1 / tp, weights=1 / tp),
    )
    return part, (*gathered, *scattered)


def _split(layer: Linear, tp: int, name: str) -> Linear:
    word = _word(layer)
    if word not in COLUMNS | ROWS:
        raise UsageError(
            f"tp={tp}: {name} has a layer {layer.fqn!r}, whose split is not known; tensor parallelism is "
            f"known for layers called {', '.join(sorted(COLUMNS | ROWS))}"
        )
    size = layer.N if word in COLUMNS else layer.K
    if size % tp:
        raise UsageError(f"tp={tp} does not divide {layer.fqn}, whose {size} features it would split")
    if word in COLUMNS:
        return replace(layer, N=layer.N // tp)
    return replace(layer, K=layer.K // tp)


def _word(layer: Linear) -> str:
    return layer.fqn.rsplit(".", 1)[-1]


def _shared(traffic: Traffic, tp: int) -> Traffic:
    return replace(traffic, eager_bytes=traffic.eager_bytes / tp, fused_bytes=traffic.fused_bytes / tp)
