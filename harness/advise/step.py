"""How long a training step takes, in bf16 and in FP8, part by part.

    step = linear products + casts + other products + attention + what runs between + optimizer + communication

Only the first two differ between bf16 and FP8, and the communication where weights are sent in FP8; Amdahl's law does
the rest. Each part is a closed form of sizes and of `Rates`. The uncertainty of a ratio follows from those of the rates:
each is moved by one standard error up and down, and the effects are added as independent ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from harness.advise.gemm import BF16, FLOOR_S, product_seconds
from harness.machine.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Group,
    seconds,
    small_all_reduce,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from harness.advise.casts import Recipe
    from harness.advise.model import Linear, Model
    from harness.advise.rates import Rates

_SCALES_A_LAYER = 2  # of a layer's three tensors, those whose scale goes across the split
_CONFIDENCE = 1.96
_BF16, _FP8 = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Again:
    """What activation checkpointing runs a second time: shares of the forward pass."""

    products: float = 0.0
    attention: float = 0.0
    between: float = 0.0


CHECKPOINTING: Mapping[str, Again] = {
    "none": Again(),
    "selective": Again(between=1.0),
    "full": Again(1.0, 1.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """Activations that go around a tensor-parallel group.

    Attributes:
        sent: bytes in bfloat16, of one forward pass.
        layers: whose input is gathered, or whose result is scattered.
        gathers: forward it is gathered, and its gradient scattered backward; else the other way round.
    """

    sent: float
    layers: tuple[str, ...]
    gathers: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model is trained.

    Attributes:
        compiled: by torch.compile.
        again: what is run twice.
        accumulation: microbatches of an optimizer step.
        dp: GPUs that have each their own data; 1: one alone.
        replicas: copies of the weights, each over `dp / replicas` GPUs (HSDP); 1: FSDP shards over all.
        tp: GPUs that share each layer; the model given to `step_cost` is then one GPU's part
            (`harness.advise.tensor_parallel`), and `exchanges` what it sends.
        exchanges: activations that tensor parallelism gathers and scatters in one pass.
        node: GPUs of a node.
        gather_fp8: FSDP gathers weights in FP8 where the recipe can.
        copied: FSDP2, which copies what it gathers and reduces; FSDP1 works in place.
        reduce_each: gradients are reduced after every microbatch, and not only after the last.
        tp_gather_fp8: tensor parallelism gathers activations in FP8.
        tp_overlap: each of its exchanges runs beside the products that it belongs to (asynchronous tensor parallelism).
        update_bytes: of weights, gradients and optimizer states that an update moves, for a parameter.
        gradient_bytes: of a gradient that is reduced.
        bf16_step_s: seconds of a bf16 step, measured: what the parts leave unexplained is kept in FP8 too. None: nothing
            is known.
    """

    compiled: bool = True
    again: Again = Again()
    accumulation: int = 1
    dp: int = 1
    replicas: int = 1
    tp: int = 1
    exchanges: tuple[Exchange, ...] = ()
    node: int = 8
    gather_fp8: bool = True
    copied: bool = True
    reduce_each: bool = False
    tp_gather_fp8: bool = False
    tp_overlap: bool = False
    update_bytes: float = (
        40.0  # float32: AdamW reads 16 and writes 12, clipping reads 4, reads 4 and writes 4
    )
    gradient_bytes: float = 4.0
    bf16_step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one optimizer step by part."""

    linear: float
    casts: float
    products: float
    attention: float
    between: float
    optimizer: float
    communication: float
    launches: float
    unexplained: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one Linear layer, forward and backward, without recomputation.

    Attributes:
        layer: which.
        bf16, fp8: of each GEMM.
        casts: of each tensor, and of the input's gradient where it is rescaled; the input's is that of all layers
            that share it.
        forward_casts: of each tensor, what recomputation adds: the cast for the forward product alone.
    """

    layer: Linear
    bf16: Mapping[str, float]
    fp8: Mapping[str, float]
    casts: Mapping[str, float]
    forward_casts: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """With a cast of its own."""
        return sum(self.bf16.values()) / (sum(self.fp8.values()) + sum(self.casts.values()))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speedup with the interval in which it is expected, 95 %."""

    value: float
    low: float
    high: float

    def less(self, errors: float) -> float:
        """The value so many of its standard errors lower."""
        return self.value * (self.low / self.value) ** (errors / _CONFIDENCE)


def gemm_sizes(layer: Linear) -> dict[str, tuple[int, int, int]]:
    """M, K, N of each GEMM of a layer."""
    T, K, N = layer.tokens, layer.K, layer.N
    return {"output": (T, K, N), "grad_input": (T, N, K), "grad_weight": (N, T, K)}


def layer_cost(layer: Linear, recipe: Recipe | None, rates: Rates) -> LayerCost:
    """Cost of one layer; a GEMM that the recipe does not convert costs the same in both."""
    bf16, fp8 = {}, {}
    for role, size in gemm_sizes(layer).items():
        bf16[role] = product_seconds(rates, BF16, role, *size)
        fp8[role] = bf16[role]
        if recipe is not None and role in recipe.fp8_gemms:
            fp8[role] = product_seconds(rates, recipe.kind, role, *size) / recipe.product_share
    elements = {
        "input": layer.tokens * layer.K,
        "weight": layer.K * layer.N,
        "grad_output": layer.tokens * layer.N,
    }
    if recipe is None:
        nothing = dict.fromkeys(elements, 0.0)
        return LayerCost(layer, bf16, fp8, nothing, nothing)
    casts = {t: cast_seconds(elements[t], t, recipe, rates) for t in elements}
    forward = {t: forward_cast_seconds(elements[t], t, recipe, rates) for t in elements}
    if recipe.rescaled and "grad_input" in recipe.fp8_gemms:
        casts["grad_input"] = elements["input"] * recipe.rescaled / rates["bandwidth"]
        forward["grad_input"] = 0.0
    return LayerCost(layer, bf16, fp8, casts, forward)


def cast_seconds(elements: float, tensor: str, recipe: Recipe, rates: Rates) -> float:
    """Seconds of a tensor's casts, forward and backward together."""
    cast = recipe.casts.get(tensor)
    if cast is None or not cast.total:
        return 0.0
    bandwidth = rates["bandwidth"]
    if recipe.by == "kernels":  # they transpose in tiles
        return max(elements * cast.total / (bandwidth * rates["casts"]), FLOOR_S * cast.kernels)
    moved = cast.streamed + cast.strided / rates["strided"]
    return max(elements * moved / bandwidth, FLOOR_S * cast.kernels)


def forward_cast_seconds(elements: float, tensor: str, recipe: Recipe, rates: Rates) -> float:
    """Seconds of the cast of a tensor that the forward product alone needs."""
    cast = recipe.casts.get(tensor)
    if cast is None or not cast.forward:
        return 0.0
    speed = rates["bandwidth"] * (rates["casts"] if recipe.by == "kernels" else 1.0)
    return max(elements * cast.forward / speed, FLOOR_S)


def step_cost(
    model: Model, rates: Rates, plan: Plan, recipe: Recipe | None, converted: Collection[str] = ()
) -> Parts:
    """One optimizer step on one GPU.

    Args:
        model: one microbatch.
        rates: of the GPU.
        plan: how it is trained.
        recipe: of the layers in `converted`; None: all in bf16.
        converted: fully qualified names.
    """
    if recipe is not None and recipe.gathered_weight is not None and plan.dp > 1 and plan.gather_fp8:
        recipe = replace(recipe, casts={**recipe.casts, "weight": recipe.gathered_weight})
    linear = casts = 0.0
    times: dict[str, Mapping[str, float]] = {}
    cast_inputs: set[int] = set()
    kernels = model.forward.fused_kernels + model.backward.fused_kernels
    if not plan.compiled:
        kernels = model.forward.eager_kernels + model.backward.eager_kernels
    known: dict[tuple[int, int, int, bool], LayerCost] = {}  # blocks repeat the same few sizes
    for layer in model.layers:
        in_fp8 = recipe is not None and layer.fqn in converted
        key = (layer.K, layer.N, layer.tokens, in_fp8)
        if key not in known:
            known[key] = layer_cost(layer, recipe if in_fp8 else None, rates)
        cost = known[key]
        times[layer.fqn] = cost.fp8
        linear += sum(cost.fp8.values()) + plan.again.products * cost.fp8["output"]
        if recipe is None or not in_fp8:
            continue
        mine = {t: cost.casts[t] + plan.again.products * cost.forward_casts[t] for t in cost.casts}
        if recipe.shares_input and layer.input_id in cast_inputs:
            mine["input"] = 0.0
        cast_inputs.add(layer.input_id)
        casts += sum(mine.values())
        kernels += sum(cast.kernels for cast in recipe.casts.values())
    bandwidth = rates["bandwidth"] * rates["between"]
    forward = model.forward.fused_bytes if plan.compiled else model.forward.eager_bytes
    backward = model.backward.fused_bytes if plan.compiled else model.backward.eager_bytes
    products = 3 * model.other / rates["bf16"]
    attention = model.attention * (3 + plan.again.attention) / rates["attention"]
    between = (forward * (1 + plan.again.between) + backward) / bandwidth
    once = linear + casts + products + attention + between
    # The CPU must have launched everything by the time that the device is done.
    launching = kernels * rates["launch" if plan.compiled else "dispatch"]
    idle = max(0.0, launching - once)
    optimizer = plan.update_bytes * model.parameters * plan.replicas / plan.dp / rates["bandwidth"]
    fp8_weights = sum(la.K * la.N for la in model.layers if la.fqn in converted) if recipe else 0
    exposed = _sharding(model, rates, plan, recipe, fp8_weights, once + idle)
    if plan.tp > 1:
        exposed += _tensor_parallel(rates, plan, recipe, len(converted), times)
    n = plan.accumulation
    return Parts(
        n * linear, n * casts, n * products, n * attention, n * between, optimizer, exposed, n * idle
    )


def gather_seconds(model: Model, rates: Rates, plan: Plan, fp8_weights: float = 0.0) -> float:
    """Seconds in which FSDP gathers the weights of one pass over the model once."""
    sent = _BF16 * (model.parameters - fp8_weights) + _FP8 * fp8_weights
    return _sharded(ALL_GATHER, sent, model, rates, plan)


def _sharding(
    model: Model, rates: Rates, plan: Plan, recipe: Recipe | None, fp8_weights: float, compute: float
) -> float:
    """What FSDP adds to the step: what computation does not hide, the first gather and last reduction, and its copies.

    With replicas (HSDP) what is reduced is then reduced among them too. FSDP2 copies what was gathered into each
    parameter (read and written, twice a pass), and gradients into what is reduced, between the products
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13: split_with_sizes_copy, chunk_cat).
    """
    if plan.dp == 1:
        return 0.0
    sends_fp8 = recipe is not None and recipe.gathered_weight is not None and plan.gather_fp8
    gathers = 2 * gather_seconds(model, rates, plan, fp8_weights if sends_fp8 else 0.0)
    gradients = plan.gradient_bytes * model.parameters
    reduce = _sharded(REDUCE_SCATTER, gradients, model, rates, plan)
    if plan.replicas > 1:
        across = Group.of(plan.replicas, plan.dp * plan.tp // plan.replicas, plan.node)
        shard = gradients * plan.replicas / plan.dp
        reduce += seconds(ALL_REDUCE, shard, across, rates["link"], rates["network"], model.blocks + 1)
    reductions = plan.accumulation if plan.reduce_each else 1
    whole = plan.accumulation * gathers + reductions * reduce
    copies = 0.0
    if plan.copied:
        sent = _BF16 * model.parameters - (fp8_weights if sends_fp8 else 0.0)
        moved = plan.accumulation * 4 * sent + reductions * (_BF16 * model.parameters + gradients)
        copies = moved / rates["bandwidth"]
    ends = (gathers / 2 + reduce) / (model.blocks + 1)
    scales = small_all_reduce(_shards(plan)) if sends_fp8 else 0.0
    return ends + scales + copies + max(0.0, whole - ends - plan.accumulation * compute)


def _shards(plan: Plan) -> Group:
    """The GPUs over which one copy of the weights lies."""
    return Group.of(plan.dp // plan.replicas, plan.tp, plan.node)


def _sharded(kind: str, payload: float, model: Model, rates: Rates, plan: Plan) -> float:
    """Seconds of a collective of each block and of what is outside of blocks."""
    return seconds(kind, payload, _shards(plan), rates["link"], rates["network"], model.blocks + 1)


def _tensor_parallel(
    rates: Rates, plan: Plan, recipe: Recipe | None, converted: int, times: Mapping[str, Mapping[str, float]]
) -> float:
    """What tensor parallelism adds: each input is gathered and each result scattered, and backward the other way round.

    Amaxes of split tensors are agreed upon, one by one. `times` are those of the products of each layer.
    """
    fp8 = recipe is not None
    small = _SCALES_A_LAYER * converted if fp8 else 0
    halved = _FP8 / _BF16 if fp8 and plan.tp_gather_fp8 else 1.0
    group = Group.of(plan.tp, 1, plan.node)
    spent = 0.0
    for exchange in plan.exchanges:
        for role, gathering, passes in (
            ("output", exchange.gathers, 1 + plan.again.products),
            ("grad_input", not exchange.gathers, 1.0),
        ):
            kind, payload = (
                (ALL_GATHER, exchange.sent * halved) if gathering else (REDUCE_SCATTER, exchange.sent)
            )
            once = seconds(kind, payload, group, rates["link"], rates["network"])
            if plan.tp_overlap and not (gathering and recipe is not None and not recipe.fuses_gathers):
                once = max(0.0, once - sum(times[fqn][role] for fqn in exchange.layers))
            spent += passes * once
    return plan.accumulation * (spent + small * small_all_reduce(group))


def step_ratio(model: Model, rates: Rates, plan: Plan, recipe: Recipe, converted: Collection[str]) -> float:
    """Step time in bf16 over step time in FP8."""
    bf16 = step_cost(model, rates, plan, None)
    fp8 = step_cost(model, rates, plan, recipe, converted)
    rest = unexplained(plan, bf16)
    return (bf16.total + rest) / (fp8.total + rest)


def unexplained(plan: Plan, bf16: Parts) -> float:
    """Seconds of a measured bf16 step that its parts do not explain."""
    return 0.0 if plan.bf16_step_s is None else max(0.0, plan.bf16_step_s - bf16.total)


def speedup(model: Model, rates: Rates, plan: Plan, recipe: Recipe, converted: Collection[str]) -> Ratio:
    """Step time in bf16 over step time in FP8, with its interval."""

    def value(at: Rates) -> float:
        return step_ratio(model, at, plan, recipe, converted)

    return with_interval(value, rates, rates.figures)


def with_interval(
    value: Callable[[Rates], float], rates: Rates, names: Sequence[str] | Mapping[str, object]
) -> Ratio:
    """A positive figure and the interval that the uncertainty of the rates gives it."""
    middle = value(rates)
    variance = sum(
        (math.log(value(rates.shifted(name, 1.0)) / value(rates.shifted(name, -1.0))) / 2) ** 2
        for name in names
    )
    half = math.exp(_CONFIDENCE * math.sqrt(variance))
    return Ratio(middle, middle / half, middle * half)
