"""What one training step of a model consists of, as plain data: its layers, its attention, and everything else.

`harness.advise.trace` makes it from a module. The part of it that one GPU has follows here: a share of each layer
(`split`, tensor parallelism with sequence parallelism), and some of the blocks (`slowest_stage` of a pipeline).
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# By the last word of a layer's name: split along its output (columns) or along its input (rows).
_HF_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "c_attn", "c_fc"}
COLUMNS = frozenset({"q", "k", "v", "qkv", "gate", "up", "head"} | _HF_COLUMNS)
ROWS = frozenset({"o", "down", "proj", "o_proj", "down_proj", "c_proj"})
_PADDING = 128  # of a vocabulary, for its products


@dataclass(frozen=True, slots=True)
class Linear:
    """One Linear layer as it is used in a forward pass.

    Attributes:
        fqn: fully qualified name.
        K, N: input and output features.
        tokens: rows of its input in one forward pass, over all its calls.
        input_id: the same for layers that read the same tensor.
        barred: the recipes that it cannot run whatever they cost, and why (its class, its shape).
        is_head: the output head: it stays in high precision unless FP8 is asked for there.
    """

    fqn: str
    K: int
    N: int
    tokens: int
    input_id: int
    barred: Mapping[str, str] = field(default_factory=dict)
    is_head: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of the three GEMMs."""
        return 6.0 * self.tokens * self.K * self.N

    @property
    def word(self) -> str:
        """Last word of its name."""
        return self.fqn.rsplit(".", 1)[-1]

    @property
    def block(self) -> int | None:
        """Number of the block that it is in; None outside of blocks."""
        return next((int(part) for part in self.fqn.split(".") if part.isdigit()), None)


@dataclass(frozen=True, slots=True)
class VectorTraffic:
    """What runs between the matrix products, forward or backward; a vector.

    Attributes:
        eager_bytes: reads and writes of every operator by itself.
        fused_bytes: the same if neighbours were fused into one kernel up to the next matrix product.
        eager_kernels, fused_kernels: launches, those of the products included.
    """

    eager_bytes: float = 0.0
    fused_bytes: float = 0.0
    eager_kernels: float = 0
    fused_kernels: float = 0

    def __add__(self, other: VectorTraffic) -> VectorTraffic:
        return VectorTraffic(
            *(getattr(self, f) + getattr(other, f) for f in VectorTraffic.__dataclass_fields__)
        )

    def __mul__(self, factor: float) -> VectorTraffic:
        return VectorTraffic(*(getattr(self, f) * factor for f in VectorTraffic.__dataclass_fields__))

    def with_bytes(self, factor: float) -> VectorTraffic:
        """Bytes times a factor, in as many launches."""
        return replace(self, eager_bytes=self.eager_bytes * factor, fused_bytes=self.fused_bytes * factor)


@dataclass(frozen=True, slots=True)
class Outside:
    """What of a model lies outside of its repeated blocks: embedding, head, loss. Meanings as in `Model`."""

    parameters: int
    forward: VectorTraffic = VectorTraffic()
    backward: VectorTraffic = VectorTraffic()
    attention: float = 0.0
    other: float = 0.0


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
        parameters: all weights.
        blocks: repeated blocks, by the longest numbered list of modules.
        experts: it has grouped experts.
        whole: False where only the Linear layers are known, and neither attention nor what runs between.
        example: its layers are called as in this project's model, and not as in the reader's.
        active: parameters that a token meets, of experts only those it uses; 0: all of them.
        exchanges: activations that tensor parallelism gathers and scatters in one pass, of one GPU's part.
        outside: what of all that lies outside of the blocks; None where that is not known.
    """

    name: str
    layers: tuple[Linear, ...]
    tokens: int
    attention: float = 0.0
    other: float = 0.0
    forward: VectorTraffic = VectorTraffic()
    backward: VectorTraffic = VectorTraffic()
    parameters: int = 0
    blocks: int = 1
    experts: bool = False
    whole: bool = True
    outside: Outside | None = None
    example: bool = False
    active: int = 0
    exchanges: tuple[GroupExchange, ...] = ()

    @property
    def width(self) -> int:
        """Input features that most of the layers' FLOPs have: of the residual stream; 0 without layers."""
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
        layers = tuple(replace(layer, tokens=round(layer.tokens * factor)) for layer in self.layers)
        exchanges = tuple(replace(each, sent=each.sent * factor) for each in self.exchanges)
        return replace(_scaled(self, factor, 1.0), layers=layers, tokens=tokens, exchanges=exchanges)


def mark_head(layers: Sequence[Linear], vocabularies: Iterable[int | None]) -> tuple[Linear, ...]:
    """The layers, the last of which is the output head if it has an output for each token of a vocabulary, padded or not."""
    sizes = [size for size in vocabularies if size]
    return tuple(
        replace(layer, is_head=layer is layers[-1] and any(0 <= layer.N - n < _PADDING for n in sizes))
        for layer in layers
    )


def head_in_fp8(model: Model) -> Model:
    """The same model, whose output head may be converted as any other layer."""
    return replace(model, layers=mark_head(model.layers, ()))


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """Activations that go around a tensor-parallel group.

    Attributes:
        sent: bytes in bfloat16, of one forward pass.
        layers: whose input is gathered, or whose result is scattered.
        gathers: forward it is gathered, and its gradient scattered backward; else the other way round.
    """

    sent: float
    layers: tuple[str, ...]
    gathers: bool


def weighted(*terms: tuple[float, Model | Outside]) -> dict[str, Any]:
    """Sum of passes, each times its weight: all but the layers, by name."""
    names = ("attention", "other", "forward", "backward", "parameters")
    return {n: functools.reduce(operator.add, (getattr(p, n) * w for w, p in terms)) for n in names}


def _scaled(model: Model, work: float, weights: float) -> Model:
    """Traffic and FLOPs times one factor, parameters times another; launches are as many."""

    def changed(part: Model | Outside) -> dict[str, Any]:
        return {
            "attention": part.attention * work,
            "other": part.other * work,
            "forward": part.forward.with_bytes(work),
            "backward": part.backward.with_bytes(work),
            "parameters": round(part.parameters * weights),
        }

    outside = None if model.outside is None else Outside(**changed(model.outside))
    return replace(model, **changed(model), outside=outside)


def split(model: Model, tp: int) -> Model:
    """The part of one of `tp` GPUs, with the activations that go around the group in one forward pass.

    The pass has the tokens of the whole group. Between the products tokens are split too, so that what runs there
    is shared as well.

    Raises:
        UsageError: a layer whose name says neither, or sizes that `tp` does not divide.
    """
    if tp == 1:
        return model
    layers = []
    readers: dict[int, list[Linear]] = {}
    scattered = []
    for layer in model.layers:
        if layer.word not in COLUMNS | ROWS:
            raise UsageError(
                f"tp={tp}: {model.name} has a layer {layer.fqn!r}, whose split is not known; tensor parallelism is "
                f"known for layers called {', '.join(sorted(COLUMNS | ROWS))}"
            )
        side = "N" if layer.word in COLUMNS else "K"
        size = getattr(layer, side)
        if size % tp:
            raise UsageError(f"tp={tp} does not divide {layer.fqn}, whose {size} features it would split")
        layers.append(replace(layer, **{side: size // tp}))
        if side == "N":
            readers.setdefault(layer.input_id, []).append(layer)
        else:
            scattered.append(GroupExchange(2.0 * layer.tokens * layer.N, (layer.fqn,), False))
    gathered = [
        GroupExchange(2.0 * g[0].tokens * g[0].K, tuple(la.fqn for la in g), True) for g in readers.values()
    ]
    part = _scaled(model, 1 / tp, 1 / tp)
    return replace(part, layers=tuple(layers), exchanges=(*gathered, *scattered))


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
    rest = tuple(layer for layer in model.layers if layer.block is None)
    head = sum(layer.flops for layer in rest) + 3 * (outside.attention + outside.other)
    whole = sum(layer.flops for layer in model.layers) + 3 * (model.attention + model.other)
    each = (whole - head) / model.blocks

    def others(last: int) -> int:
        return math.ceil((model.blocks - last) / (pp - 1))

    last = min(range(model.blocks), key=lambda n: (max(others(n) * each, n * each + head), -n))
    is_last = last * each + head >= others(last) * each
    count = last if is_last else others(last)
    share = count / model.blocks
    amounts = weighted((share, model), (is_last - share, outside))
    weights = round(amounts.pop("parameters") - is_last * outside.parameters / 2)
    mine = tuple(layer for layer in model.layers if layer.block is not None and layer.block < count)
    layers = mine + rest * is_last
    return replace(model, layers=layers, parameters=weights, blocks=count, outside=None, **amounts)
