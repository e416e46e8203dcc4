"""How long a training step takes, in bf16 and in FP8, part by part.

    step = linear products + casts + other products + attention + what runs between + optimizer + communication + pipeline

One model for one GPU and for thousands: `harness.advise.sent` has what others add. Only the first two differ between bf16 and FP8, and the communication where weights are sent in FP8; Amdahl's law does
the rest. Each part is a closed form of sizes and of `Rates`. The uncertainty of a ratio follows from those of the rates:
each is moved by one standard error up and down, and the effects are added as independent ones.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from harness.advise.gemm import BF16, FLOOR_S, product_seconds
from harness.advise.pipeline import slowest_stage
from harness.advise.plan import CHECKPOINTING, Exchange, Plan, Recompute
from harness.advise.sent import Pass, as_sent, gather_seconds, pipeline, sharding, tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from harness.advise.casts import RecipeCost
    from harness.advise.model import Linear, Model
    from harness.advise.rates import Rates

_CONFIDENCE = 1.96


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
    pipeline: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def seconds(self) -> dict[str, float]:
        """By name, with the total."""
        return asdict(self) | {"total": self.total}


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


def layer_cost(layer: Linear, recipe: RecipeCost | None, rates: Rates) -> LayerCost:
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


def cast_seconds(elements: float, tensor: str, recipe: RecipeCost, rates: Rates) -> float:
    """Seconds of a tensor's casts, forward and backward together."""
    cast = recipe.casts.get(tensor)
    if cast is None or not cast.total:
        return 0.0
    bandwidth = rates["bandwidth"]
    if recipe.by == "kernels":  # they transpose in tiles
        return max(elements * cast.total / (bandwidth * rates["casts"]), FLOOR_S * cast.kernels)
    moved = cast.streamed + cast.strided / rates["strided"]
    return max(elements * moved / bandwidth, FLOOR_S * cast.kernels)


def forward_cast_seconds(elements: float, tensor: str, recipe: RecipeCost, rates: Rates) -> float:
    """Seconds of the cast of a tensor that the forward product alone needs."""
    cast = recipe.casts.get(tensor)
    if cast is None or not cast.forward:
        return 0.0
    speed = rates["bandwidth"] * (rates["casts"] if recipe.by == "kernels" else 1.0)
    return max(elements * cast.forward / speed, FLOOR_S)


def step_cost(
    model: Model, rates: Rates, plan: Plan, recipe: RecipeCost | None, converted: Collection[str] = ()
) -> Parts:
    """One optimizer step on one GPU.

    Args:
        model: one microbatch.
        rates: of the GPU.
        plan: how it is trained.
        recipe: of the layers in `converted`; None: all in bf16.
        converted: fully qualified names.
    """
    model = slowest_stage(model, plan.pp)
    if recipe is not None:
        recipe = as_sent(recipe, plan)
    linear = casts = first = 0.0
    coded = in_fp8_layers = 0
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
        linear += sum(cost.fp8.values()) + plan.again.matmul * cost.fp8["output"]
        first += cost.fp8["output"]
        if recipe is None or not in_fp8:
            continue
        mine = {t: cost.casts[t] + plan.again.matmul * cost.forward_casts[t] for t in cost.casts}
        early = dict(cost.forward_casts)
        if recipe.shares_input and layer.input_id in cast_inputs:
            mine["input"] = early["input"] = 0.0
        cast_inputs.add(layer.input_id)
        casts += sum(mine.values())
        first += sum(min(early[t], mine[t]) for t in mine)
        coded += layer.K * layer.N
        in_fp8_layers += 1
        kernels += sum(cast.kernels for cast in recipe.casts.values())
    bandwidth = rates["bandwidth"] * rates["between"]
    forward = model.forward.fused_bytes if plan.compiled else model.forward.eager_bytes
    backward = model.backward.fused_bytes if plan.compiled else model.backward.eager_bytes
    products = 3 * model.other / rates["bf16"]
    attention = model.attention * (3 + plan.again.attention) / rates["attention"]
    between = (forward * (1 + plan.again.elementwise) + backward) / bandwidth
    once = linear + casts + products + attention + between
    # The CPU must have launched everything by the time that the device is done.
    launching = kernels * rates["launch" if plan.compiled else "dispatch"]
    idle = max(0.0, launching - once)
    first += products / 3 + model.attention / rates["attention"] + forward / bandwidth
    first += idle * first / once if once else 0.0
    busy = Pass(first, once + idle - first)
    optimizer = plan.update_bytes * model.parameters * plan.replicas / plan.dp / rates["bandwidth"]
    n = plan.accumulation
    exchanged = Pass(0.0, 0.0)
    if plan.tp > 1:
        exchanged = tensor_parallel(rates, plan, recipe, in_fp8_layers, times)
    exposed = n * exchanged.total + sharding(model, rates, plan, recipe, coded, busy + exchanged)
    waiting = pipeline(model, rates, plan, busy + exchanged)
    return Parts(
        n * linear,
        n * casts,
        n * products,
        n * attention,
        n * between,
        optimizer,
        exposed,
        n * idle,
        pipeline=waiting,
    )


def step_ratio(
    model: Model, rates: Rates, plan: Plan, recipe: RecipeCost, converted: Collection[str]
) -> float:
    """Step time in bf16 over step time in FP8."""
    bf16 = step_cost(model, rates, plan, None)
    fp8 = step_cost(model, rates, plan, recipe, converted)
    rest = unexplained(plan, bf16)
    return (bf16.total + rest) / (fp8.total + rest)


def unexplained(plan: Plan, bf16: Parts) -> float:
    """Seconds of a measured bf16 step that its parts do not explain."""
    return 0.0 if plan.bf16_step_s is None else max(0.0, plan.bf16_step_s - bf16.total)


def speedup(model: Model, rates: Rates, plan: Plan, recipe: RecipeCost, converted: Collection[str]) -> Ratio:
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


__all__ = [
    "CHECKPOINTING",
    "Exchange",
    "LayerCost",
    "Parts",
    "Plan",
    "Ratio",
    "Recompute",
    "cast_seconds",
    "forward_cast_seconds",
    "gather_seconds",
    "gemm_sizes",
    "layer_cost",
    "speedup",
    "step_cost",
    "step_ratio",
    "unexplained",
    "with_interval",
]
