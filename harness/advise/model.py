"""What one training step of a model consists of, as plain data: its layers, its attention, and everything else.

`harness.advise.trace` makes it from a module; judging needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Linear:
    """One Linear layer as it is used in a forward pass.

    Attributes:
        fqn: fully qualified name.
        K, N: input and output features.
        tokens: rows of its input in one forward pass, over all its calls.
        input_id: the same for layers that read the same tensor.
        barred: the recipes that it cannot run whatever they cost, and why (its class, its shape).
    """

    fqn: str
    K: int
    N: int
    tokens: int
    input_id: int
    barred: Mapping[str, str] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """FLOPs of the three GEMMs."""
        return 6.0 * self.tokens * self.K * self.N


@dataclass(frozen=True, slots=True)
class Traffic:
    """What runs between the matrix products, forward and backward.

    Attributes:
        eager_bytes: reads and writes of every operator by itself.
        fused_bytes: the same if neighbours were fused into one kernel up to the next matrix product.
        eager_kernels, fused_kernels: launches, those of the products included.
    """

    eager_bytes: float
    fused_bytes: float
    eager_kernels: int
    fused_kernels: int


@dataclass(frozen=True, slots=True)
class Outside:
    """What of a model lies outside of its repeated blocks: embedding, head, loss. Meanings as in `Model`."""

    parameters: int
    forward: Traffic
    backward: Traffic
    attention: float = 0.0
    other: float = 0.0

    def scaled(self, factor: float, weights: float = 1.0) -> Outside:
        """Traffic and FLOPs times one factor, parameters times another."""
        return Outside(
            round(self.parameters * weights),
            _scaled(self.forward, factor),
            _scaled(self.backward, factor),
            self.attention * factor,
            self.other * factor,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """One forward and backward pass on one GPU.

    Attributes:
        name: for the report.
        layers: every Linear in the order of use.
        tokens: of the pass: rows that the layers of most FLOPs see; 0 without layers.
        attention: FLOPs of attention's forward products that really run (causal: half of T x T).
        other: FLOPs of all other matrix products, forward (grouped experts, `bmm`): they stay in high precision.
        forward, backward: what runs between the products.
        parameters: all weights; `in_linears` of them are weights of Linear layers.
        width: of the residual stream, as the most common input size; 0 without layers.
        blocks: repeated blocks, by the longest numbered list of modules.
        experts: it has grouped experts.
        whole: False where only the Linear layers are known, and neither attention nor what runs between.
        outside: what of all that lies outside of the blocks; None where that is not known.
    """

    name: str
    layers: tuple[Linear, ...]
    tokens: int
    attention: float
    other: float
    forward: Traffic
    backward: Traffic
    parameters: int
    in_linears: int
    blocks: int
    experts: bool = False
    whole: bool = True
    outside: Outside | None = None

    @property
    def width(self) -> int:
        """Input features that most of the layers' FLOPs have; 0 without layers."""
        share: dict[int, float] = {}
        for layer in self.layers:
            share[layer.K] = share.get(layer.K, 0.0) + layer.flops
        return max(share, key=lambda size: share[size], default=0)

    def with_tokens(self, tokens: int) -> Model:
        """The same model with more or fewer sequences in a pass: all that is proportional to tokens is scaled.

        Traffic of weights' gradients does not grow with tokens; it is small beside activations where FP8 matters, and
        is scaled along.
        """
        factor = tokens / self.tokens
        return replace(
            self,
            layers=tuple(replace(layer, tokens=round(layer.tokens * factor)) for layer in self.layers),
            tokens=tokens,
            attention=self.attention * factor,
            other=self.other * factor,
            forward=_scaled(self.forward, factor),
            backward=_scaled(self.backward, factor),
            outside=None if self.outside is None else self.outside.scaled(factor),
        )


def _scaled(traffic: Traffic, factor: float) -> Traffic:
    return replace(
        traffic, eager_bytes=traffic.eager_bytes * factor, fused_bytes=traffic.fused_bytes * factor
    )
