"""From a Hugging Face `config.json` to `harness.advise.model.Model`: its layers alone, as of a module that cannot be called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8core.recipe import RECIPES
from harness.advise.model import Linear, Model, Outside, Traffic
from harness.advise.trace import barred_layers
from harness.training.models.hugging_face import EXPERTS, ROUTER

if TYPE_CHECKING:
    from harness.training.models.hugging_face import HfModel

_ROUTER = dict.fromkeys(RECIPES.own, "a router, which picks experts in high precision")


def of_config(described: HfModel, tokens: int) -> Model:
    """Facts of a model: each Linear on all tokens; experts, of which a token uses `top_k`, as products in high precision.

    What runs between the products and attention are not known, and are left out.
    """
    shapes = sorted({(part.K, part.N) for part in described.parts if part.kind != EXPERTS})
    with torch.device("meta"):
        module = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)
    barred = barred_layers(module)
    reasons = {shape: barred.get(str(i), {}) for i, shape in enumerate(shapes)}
    places: dict[str, int] = {}
    layers = [
        Linear(
            part.name,
            part.K,
            part.N,
            tokens,
            places.setdefault(part.reads, len(places)),
            _ROUTER if part.kind == ROUTER else reasons[part.K, part.N],
        )
        for part in described.parts
        if part.kind != EXPERTS
    ]
    experts = [part for part in described.parts if part.kind == EXPERTS]
    nothing = Traffic(0.0, 0.0, 0, 0)
    return Model(
        name=described.name,
        layers=tuple(layers),
        tokens=tokens,
        attention=0.0,
        other=2.0 * tokens * described.top_k * sum(part.K * part.N for part in experts),
        forward=nothing,
        backward=nothing,
        parameters=described.parameters,
        in_linears=sum(layer.K * layer.N for layer in layers),
        blocks=described.blocks,
        experts=bool(experts),
        whole=False,
        outside=Outside(described.parameters - _in_blocks(described), nothing, nothing),
    )


def _in_blocks(described: HfModel) -> int:
    """Weights of matrices in blocks, which have a number in their names; those of norms are left to the rest."""
    inside = (p for p in described.parts if any(word.isdigit() for word in p.name.split(".")))
    return sum(part.elements for part in inside)
