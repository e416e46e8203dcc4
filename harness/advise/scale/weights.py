"""The parameters of a named model as one rank of tensor parallelism has them, from the model made on "meta"."""

from __future__ import annotations

import functools

from torch import nn

from fp8core.convert import audit, convert_to_float8_training
from fp8core.distributed.weight_gather import recipe_reason
from fp8core.recipe import RECIPES
from harness.advise.model import COLUMNS, ROWS
from harness.advise.scale.counts import Weight, Weights
from harness.training.models import MODELS

_BLOCKS = "layers."


@functools.cache
def weights_of(model: str, recipe: str, tp: int, left_out: tuple[str, ...] = ()) -> Weights:
    """The parameters of each block and of the rest; a tied one counts once.

    FSDP can send a recipe's weights in FP8 where one cast serves both GEMMs that read them.

    Args:
        model: a name of `harness.training.models.MODELS`.
        recipe: a name of `fp8core.RECIPES`, or "" for none.
        tp: GPUs that split each layer: a row-wise parallel one along its input, every other along its output.
        left_out: last words of the names of layers that stay in bf16.
    """
    spec = MODELS[model]
    one = spec.build(device="meta", layers=1)
    coded: set[str] = set()
    if recipe and not recipe_reason(RECIPES[recipe]):
        changed = convert_to_float8_training(one, config=RECIPES[recipe], allow_no_conversion=True)
        coded = {layer.fqn for layer in audit(changed).converted}
    found: tuple[list[Weight], list[Weight]] = ([], [])
    for name, parameter in one.named_parameters():
        layer, _, kind = name.rpartition(".")
        word, shape = layer.rsplit(".", 1)[-1], list(parameter.shape)
        embeds = isinstance(one.get_submodule(layer), nn.Embedding)
        if kind == "weight" and (embeds or word in COLUMNS | ROWS):
            shape[int(word in ROWS and not embeds)] //= tp
        weight = Weight(tuple(shape), kind == "weight" and layer in coded and word not in left_out)
        found[name.startswith(_BLOCKS)].append(weight)
    return Weights(tuple(found[True]), spec.layers, tuple(found[False]))
