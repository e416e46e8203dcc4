"""Weights that ranks share: whether all of them computed with the same one, and FSDP2's whole is made of their parts.

DDP     each rank holds the weight
FSDP2   each holds a part, which must lie in its place in what was gathered (of codes: `.gathered_codes`)

A checksum of what the first forward pass of a layer read goes to the other ranks with the verdict (`.ranks`); under DDP
also those of all other parameters, such as biases and norms, and of each gradient as the optimizer, or the end of the
step, finds it. Of ranks that share in other ways nothing is known.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as optimizers

from fp8core.distributed.fsdp_state import gathered_parts, replicas, replicated
from fp8core.proof.verify.operands import matrix, plain, quietly
from fp8core.proof.verify.oracle import mixers, tiles
from fp8core.proof.verify.ranks import GRADIENT
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from fp8core.proof.verify.records import LayerProof

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SharedWeights:
    """What the layers of a model read.

    Attributes:
        sums: layer, or parameter beside a layer's weight, or gradient -> (the ranks that must have the same, the checksum).
        layers: of the keys those of layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sums: dict[str, tuple[tuple[int, ...], int]] = {}
        self.layers: set[str] = set()
        self._params: dict[str, tuple[tuple[int, ...], torch.Tensor]] | None = None
        self._parts = {layer: (plain(layer.weight), *where) for layer, where in gathered_parts(model).items()}

    def look(self, fqn: str, layer: nn.Module, weight: torch.Tensor, proof: LayerProof) -> None:
        """Takes the weight [N, K] of a forward pass, or its codes."""
        part = self._parts.get(layer)
        ranks = replicas(layer) if part is None else part[-1]
        if len(ranks) < 2 or fqn in self.sums:
            return
        self.layers.add(fqn)
        if isinstance(weight, Float8Tensor):
            self.sums[fqn] = ranks, checksum(weight.qdata) ^ checksum(weight.scale_inv.reshape(-1, 1))
            return
        self.sums[fqn] = ranks, checksum(weight)
        if part is not None:
            local, dim, index, count, _ = part
            own = torch.cat([*weight.chunk(count, dim)[index : index + 1], weight.narrow(dim, 0, 0)], dim)
            local = local.to(own.dtype)
            if own.shape != local.shape or not torch.allclose(own, local, 0, 0, equal_nan=True):
                proof.fault("gathered weight: the part of this rank does not lie in its place")

    def look_at_rest(self) -> None:
        """All parameters that DDP, whose forward pass runs, keeps the same; once."""
        if self._params is not None:
            return
        self._params = replicated()
        with quietly():
            for name, (ranks, p) in self._params.items():
                self.sums[name] = ranks, checksum(matrix(plain(p)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks at gradients when an optimizer reads them, else at the end of the block."""
        handle = optimizers.register_optimizer_step_pre_hook(lambda *_: self._look_at_gradients())
        # Before whatever hides gradients from optimizers
        hooks: Any = optimizers._global_optimizer_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        try:
            yield
            self._look_at_gradients()
        finally:
            handle.remove()

    def _look_at_gradients(self) -> None:
        with quietly():
            for name, (ranks, p) in (self._params or {}).items():
                if p.grad is not None and p.grad.layout == torch.strided and GRADIENT + name not in self.sums:
                    self.sums[GRADIENT + name] = ranks, checksum(matrix(plain(p.grad)))


def checksum(x: torch.Tensor) -> int:
    """A checksum of the bits of a matrix, the same on every device; one wrong bit, or two elements exchanged, moves it."""
    bits = x.contiguous().view(_BITS[x.itemsize])
    rows, columns = mixers(sum(x.shape), x.device).split(list(x.shape))
    return sum(
        int(((bits[lines, along].long() * columns[along]).sum(1) * rows[lines]).sum())
        for lines, along in tiles(*x.shape)
    )
