"""torchao_nocompile: `torchao.prototype.float8nocompile`, Triton casts that make eager FP8 pay.

A prototype of tensorwise scaling only: it ignores every other configuration. Its kernels need Triton on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.peers import torchao
from harness.peers.peer import Peer, triton_missing

if TYPE_CHECKING:
    from torch import nn

MODULE = "torchao.prototype.float8nocompile.float8nocompile_linear"


def missing(device: str) -> str | None:
    """A GPU with Triton, and a torchao that still has the prototype."""
    return triton_missing(device) or torchao.missing(device)


def linear(layer: nn.Linear, recipe: str) -> nn.Module:
    """`Float8LinearNoCompile` with its own defaults.

    Raises:
        ValueError: a recipe other than tensorwise, which it would silently ignore.
    """
    if recipe != "tensorwise":
        raise ValueError(f"float8nocompile ignores recipe {recipe!r}; it offers tensorwise only")
    torchao.load(MODULE)
    from torchao.float8 import Float8LinearConfig
    from torchao.prototype.float8nocompile.float8nocompile_linear import Float8LinearNoCompile

    return Float8LinearNoCompile.from_float(layer, config=Float8LinearConfig())


PEER = Peer(
    arm="nocompile",
    doc="torchao.prototype.float8nocompile",
    missing=missing,
    version=torchao.version,
    recipes=("tensorwise",),
    modes=("eager",),
    linear=linear,
)
