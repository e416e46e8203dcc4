"""The parameters of a named model as one rank of tensor parallelism has them, from the model made on "meta"."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import nn

from fp8core.convert import audit, convert_to_float8_training
from fp8core.distributed.gather_reasons import recipe_reason
from fp8core.recipe import RECIPES
from harness.advise.scale.counts import Weight, Weights
from harness.advise.tensor_parallel import COLUMNS, ROWS
from harness.training.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterable

_BLOCKS = "layers."


@functools.cache
def weights_of(model: str, recipe: str, tp: int, left_out: tuple[str, ...] = ()) -> Weights:
    """The parameters of each block and of the rest; a tied one counts once.

    Args:
        model: a name of `harness.training.models.MODELS`.
        recipe: a name of `fp8core.RECIPES`, or "" for none.
        tp: GPUs that split each layer.
        left_out: last words of the names of layers that stay in bf16.
    """
    spec = MODELS[model]
    one = spec.build(device="meta", layers=1)
    coded = set(converted(one, recipe)) if recipe and sends_codes(recipe) else set()
    coded = {name for name in coded if name.rsplit(".", 1)[-1] not in left_out}
    split = {
        f"{name}.weight": _dimension(name, part) for name, part in one.named_modules() if _splits(name, part)
    }
    named = list(one.named_parameters())

    def pick(inside: bool) -> Iterable[Weight]:
        for name, parameter in named:
            if name.startswith(_BLOCKS) is inside:
                shape = list(parameter.shape)
                if tp > 1 and name in split:
                    shape[split[name]] //= tp
                yield Weight(tuple(shape), name.removesuffix(".weight") in coded)

    return Weights(tuple(pick(True)), spec.layers, tuple(pick(False)))


def converted(model: nn.Module, recipe: str) -> list[str]:
    """Names of the layers that fp8core converts to a recipe."""
    changed = convert_to_float8_training(model, config=RECIPES[recipe], allow_no_conversion=True)
    return [layer.fqn for layer in audit(changed).converted]


def sends_codes(recipe: str) -> bool:
    """Whether FSDP can send a recipe's weights in FP8: where one cast serves both GEMMs that read them."""
    return not recipe_reason(RECIPES[recipe])


def _splits(name: str, part: nn.Module) -> bool:
    return isinstance(part, nn.Linear | nn.Embedding) and bool(
        isinstance(part, nn.Embedding) or name.rsplit(".", 1)[-1] in COLUMNS | ROWS
    )


def _dimension(name: str, part: nn.Module) -> int:
    """Dimension along which a weight [out, in] is split: `in` for row-wise parallel layers, else `out`."""
    return 1 if isinstance(part, nn.Linear) and name.rsplit(".", 1)[-1] in ROWS else 0
