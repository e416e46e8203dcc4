"""The one place where an instrument attaches itself to the library: what a layer, a gather or a reduction of scales shows it.

The library calls what it finds here and imports no instrument; `fp8core.proof` puts its own in and takes them out again. All
is empty but while something watches, so that any other step asks an empty dict or runs over an empty list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    from fp8core.gemm.layout import Operand
    from fp8core.history import Amaxes
    from fp8core.recipe import Cast, Recipe
    from fp8core.tensor import Float8Tensor


class CallObserver(Protocol):
    """What one forward pass of a layer, and the backward pass that belongs to it, show their casts to."""

    def saw(
        self,
        role: str,
        gemm: str,
        x: torch.Tensor | None,
        operand: Operand | torch.Tensor,
        *,
        turned: bool = False,
        group: torch.Tensor | None = None,
    ) -> None:
        """A GEMM is about to receive an operand.

        Args:
            role: of the tensor.
            gemm: that reads it.
            x: the tensor that was cast, in high precision; None or a Float8Tensor where only codes are there.
            operand: codes and scales, a Float8Tensor, or what is multiplied in high precision.
            turned: the codes of a matrix x lie as x.t().
            group: int64 [rows], which of scale_inv's first dimension a row goes by; None: scales lie as the codes do.
        """

    def commit(self) -> None:
        """The backward pass has run."""


class Gathered(NamedTuple):
    """What one gather did.

    Attributes:
        part: this rank's tokens in high precision [m, K].
        cast, dim, memory, role: as `fp8core.inputs.operands.cast_operand` took them.
        local: codes of the part.
        whole: codes of all tokens [..., K], this rank's along `placement`.
        like: the DTensor that was gathered.
    """

    part: torch.Tensor
    cast: Cast
    dim: int
    memory: Amaxes | None
    role: str
    local: Float8Tensor
    whole: Float8Tensor
    like: DTensor


# Layers and grouped products whose casts are looked at, each with what makes the observer of a call with a weight
WATCHED: dict[nn.Module, Callable[[torch.Tensor, Recipe], CallObserver]] = {}
GATHERS: list[Callable[[Gathered], None]] = []  # called with each gather of FP8 codes of activations
SCALE_REDUCTIONS: list[Callable[[], None]] = []  # called after each all-reduce of scales of sharded weights
