"""The slowest stage of a pipeline: which blocks it has, as a model of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.advise.model import Traffic
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from harness.advise.model import Linear, Model


def slowest_stage(model: Model, pp: int) -> Model:
    """The stage that all others wait for, if blocks are dealt out so that it has the fewest FLOPs.

    The last stage also has the head, and gets fewer blocks for it; all others have as many as each other, or one less. Of
    weights outside of blocks a stage has the embedding or the head: half of them.

    Raises:
        UsageError: fewer blocks than stages, or a model of which nobody knows what lies outside of its blocks.
    """
    if pp == 1:
        return model
    outside = model.outside
    if outside is None:
        raise UsageError(f"pp={pp}: how {model.name} divides into stages is not known; leave pp out")
    if pp > model.blocks:
        raise UsageError(f"pp={pp}: {model.name} has {model.blocks} blocks, and a stage needs one")
    numbered = [(_block(layer), layer) for layer in model.layers]
    rest = tuple(layer for block, layer in numbered if block is None)
    inside = sum(layer.flops for block, layer in numbered if block is not None)
    inside += 3 * (model.attention + model.other - outside.attention - outside.other)
    each = inside / model.blocks
    head = sum(layer.flops for layer in rest) + 3 * (outside.attention + outside.other)

    def others(last: int) -> int:
        return math.ceil((model.blocks - last) / (pp - 1))

    last = min(range(model.blocks), key=lambda n: (max(others(n) * each, n * each + head), -n))
    is_last = last * each + head >= others(last) * each
    count, ends = (last, 1.0) if is_last else (others(last), 0.0)
    share = count / model.blocks

    def traffic(whole: Traffic, out: Traffic) -> Traffic:
        def part(name: str) -> float:
            outer = float(getattr(out, name))
            return (getattr(whole, name) - outer) * share + ends * outer

        return Traffic(
            part("eager_bytes"),
            part("fused_bytes"),
            round(part("eager_kernels")),
            round(part("fused_kernels")),
        )

    mine = tuple(layer for block, layer in numbered if block is not None and block < count)
    weights = (model.parameters - outside.parameters) * share + ends * outside.parameters / 2
    return replace(
        model,
        layers=mine + (rest if is_last else ()),
        attention=(model.attention - outside.attention) * share + ends * outside.attention,
        other=(model.other - outside.other) * share + ends * outside.other,
        forward=traffic(model.forward, outside.forward),
        backward=traffic(model.backward, outside.backward),
        parameters=round(weights),
        blocks=count,
        outside=None,
    )


def _block(layer: Linear) -> int | None:
    """Number of the block that a layer is in; None outside of blocks."""
    return next((int(part) for part in layer.fqn.split(".") if part.isdigit()), None)
