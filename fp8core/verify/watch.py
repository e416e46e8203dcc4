"""One watched step: hooks on layers and experts, and the operators that they lead to."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from fp8core.audit import audit
from fp8core.experts.moe import GroupedMatmul
from fp8core.linear import Float8Linear
from fp8core.recipe import GEMMS
from fp8core.verify.experts import Experts
from fp8core.verify.layers import Linears
from fp8core.verify.operands import quietly
from fp8core.verify.received import Operators, Received
from fp8core.verify.records import GemmProof, LayerProof
from fp8core.verify.shards import checks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


class Watch:
    """Watches a model while the block runs; `proofs` then says what was seen.

    Attributes:
        layers, products: what is watched, by name.
        stray: FP8 GEMMs that ran outside of all layers.
    """

    def __init__(self, model: nn.Module, on_write: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        self.found = {
            layer.fqn: LayerProof(layer.fqn, layer.recipe, layer.reason, layer.all_gather)
            for layer in audit(model).layers
        }
        self.layers = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, Float8Linear)]
        self.products = [
            (fqn, m)
            for fqn, m in model.named_modules()
            if isinstance(m, GroupedMatmul) and m.recipe is not None
        ]
        for fqn, product in self.products:
            self.found[fqn] = LayerProof(fqn, str(product.recipe), "", of_experts=True)
        recipes = [(fqn, layer.recipe) for fqn, layer in self.layers]
        recipes += [(fqn, product.recipe) for fqn, product in self.products if product.recipe is not None]
        for fqn, recipe in recipes:
            self.found[fqn].gemms = {name: GemmProof(recipe.gemms[name].is_fp8) for name in GEMMS}
        self.stray = 0
        self.model = model
        self.linears = Linears(self.layers, self.found)
        self.experts = Experts(self.products, self.found, self.linears.stack)
        self.operators = Operators(self._gemm, on_write)
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        self.linears.shards = checks_of(self.layers)
        self.linears.arrived.watch(self.model)
        for part in (self.linears, self.experts, self.operators):
            self._stack.enter_context(part)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _gemm(self, received: Received) -> None:
        if self.linears.stack:
            with quietly():
                self.linears.stack[-1].received(received)
        else:
            self.stray += 1

    def proofs(self) -> list[LayerProof]:
        """With the prediction. A checkpointed call trains either outside of the backward pass, and is then
        recomputed inside (non-reentrant), or inside only (reentrant); it leads to gradients once."""
        for trains in (self.linears.trains, self.experts.trains):
            for fqn, (outside, inside) in trains.items():
                self.found[fqn].predicted += max(sum(outside), sum(inside))
            trains.clear()
        return list(self.found.values())
