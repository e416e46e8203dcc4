"""How many tokens a pass has, whatever its batch is made of: the rows that its Linear layers multiply.

Ids, images and embeddings have shapes that say nothing of it; what a layer is called with does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable


def common_rows(layers: Iterable[tuple[int, int]]) -> int:
    """Rows of the layers that do most of the work; 0 without layers.

    Args:
        layers: of each Linear the rows of its input in one forward pass, over all its calls, and the elements of its
            weight. Layers of equal rows speak together; a pooled head, with its few rows, is outvoted by the body.
    """
    work: defaultdict[int, int] = defaultdict(int)
    for rows, elements in layers:
        work[rows] += rows * elements
    return max(work, key=lambda rows: (work[rows], rows), default=0)


def tokens_of(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """`common_rows` of one forward pass of `model(*batch)`, which may be on "meta"; 0 if it calls no Linear."""
    rows: defaultdict[nn.Linear, int] = defaultdict(int)

    def seen(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(layer, nn.Linear) and args and isinstance(args[0], Tensor):
            rows[layer] += args[0].numel() // layer.in_features

    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(seen) for layer in layers]
    try:
        with torch.no_grad():
            model(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    return common_rows((count, layer.weight.numel()) for layer, count in rows.items())
