"""How long a training step takes, in bf16 and in FP8, part by part.

    step = linear products + casts + other products + attention + what runs between + optimizer + communication + pipeline

One model for one GPU and for thousands. Only the first two differ between bf16 and FP8, and the communication where
weights are sent in FP8; Amdahl's law does the rest. Each part is a closed form of sizes and of `harness.advise.rates.Rates`. The uncertainty of a
ratio follows from those of the rates: each is moved by one standard error up and down, and the effects are added as
independent ones.

FSDP gathers the weights before each pass over the model and reduces gradients in the backward pass. A gather of the forward
pass hides behind the forward pass alone, one of the backward pass and the reduction behind the backward pass; and not only
products hide them, but all that keeps the GPU's stream busy: FSDP2's copies and the exchanges of tensor parallelism
too, which go over NVLink where the shards of one weight lie on many nodes. A step can thus be bound by what is sent; then
nothing that makes products faster makes it faster, and only fewer bytes do.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from harness.advise.layer import LayerCost, layer_cost
from harness.advise.model import slowest_stage
from harness.machine.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    GpuGroup,
    seconds,
    small_all_reduce,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from harness.advise.casts import RecipeCost
    from harness.advise.model import GroupExchange, Model
    from harness.advise.rates import Rates
    from harness.training.step import Step

_CONFIDENCE = 1.96
_BF16, _FP8 = 2.0, 1.0  # bytes of an element


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
        return sum(asdict(self).values())

    @property
    def seconds(self) -> dict[str, float]:
        """By name, with the total."""
        return asdict(self) | {"total": self.total}


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one microbatch, forward and backward (what is run again is in the backward pass)."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Seconds of both parts."""
        return self.forward + self.backward

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speedup with the interval in which it is expected, 95 %."""

    value: float
    low: float
    high: float


def step_cost(
    model: Model, rates: Rates, plan: Step, recipe: RecipeCost | None, converted: Collection[str] = ()
) -> Parts:
    """One optimizer step on one GPU.

    Args:
        model: one microbatch.
        rates: of the GPU.
        plan: how it is trained.
        recipe: of the layers in `converted`; None: all in bf16.
        converted: fully qualified names.
    """
    model, again, n = slowest_stage(model, plan.pp), plan.again, plan.accumulation
    if recipe is not None:
        recipe = as_sent(recipe, plan)
    mode = "fused" if plan.compiled else "eager"
    moved, back = (getattr(part, f"{mode}_bytes") for part in (model.forward, model.backward))
    kernels = sum(getattr(part, f"{mode}_kernels") for part in (model.forward, model.backward))
    linear = casts = first = coded = 0.0
    in_fp8_layers = 0
    times: dict[str, Mapping[str, float]] = {}
    cast_inputs: set[int] = set()
    known: dict[tuple[int, int, int, bool], LayerCost] = {}  # blocks repeat the same few sizes
    for layer in model.layers:
        in_fp8 = recipe is not None and layer.fqn in converted
        key = (layer.K, layer.N, layer.tokens, in_fp8)
        if key not in known:
            known[key] = layer_cost(layer, recipe if in_fp8 else None, rates)
        cost = known[key]
        _, products, mine = cost.recomputed(again.matmul)
        times[layer.fqn] = cost.fp8
        linear += products
        first += cost.fp8["output"]
        if recipe is None or not in_fp8:
            continue
        if recipe.shares_input and layer.input_id in cast_inputs:
            mine["input"] = 0.0
        cast_inputs.add(layer.input_id)
        casts += sum(mine.values())
        first += sum(min(cost.forward_casts[t], mine[t]) for t in mine)
        coded += layer.K * layer.N
        in_fp8_layers += 1
        kernels += sum(cast.kernels for cast in recipe.casts.values())
    bandwidth = rates["bandwidth"] * rates["between"]
    others = 3 * model.other / rates["bf16"]
    attention = model.attention * (3 + again.attention) / rates["attention"]
    between = (moved * (1 + again.elementwise) + back) / bandwidth
    once = linear + casts + others + attention + between
    # The CPU must have launched everything by the time that the device is done.
    idle = max(0.0, kernels * rates["launch" if plan.compiled else "dispatch"] - once)
    first += others / 3 + model.attention / rates["attention"] + moved / bandwidth
    first += idle * first / once if once else 0.0
    exchanged = _tensor_parallel(model.exchanges, rates, plan, recipe, in_fp8_layers, times)
    busy = Pass(first, once + idle - first) + exchanged
    return Parts(
        n * linear,
        n * casts,
        n * others,
        n * attention,
        n * between,
        plan.update_bytes * model.parameters * plan.replicas / plan.dp / rates["bandwidth"],
        n * exchanged.total
        + sharding(model, rates, plan, busy, coded if sends_codes(recipe, plan) else None),
        n * idle,
        pipeline=pipeline(model, rates, plan, busy),
    )


def step_ratio(
    model: Model, rates: Rates, plan: Step, recipe: RecipeCost, converted: Collection[str]
) -> float:
    """Step time in bf16 over step time in FP8."""
    bf16, fp8 = both_steps(model, rates, plan, recipe, converted)
    return bf16.total / fp8.total


def both_steps(
    model: Model, rates: Rates, plan: Step, recipe: RecipeCost, converted: Collection[str]
) -> tuple[Parts, Parts]:
    """The step in bf16 and in FP8; what the parts of bf16 leave of a measured bf16 step is in both."""
    bf16 = step_cost(model, rates, plan, None)
    fp8 = step_cost(model, rates, plan, recipe, converted) if converted else bf16
    rest = 0.0 if plan.bf16_step_s is None else max(0.0, plan.bf16_step_s - bf16.total)
    return replace(bf16, unexplained=rest), replace(fp8, unexplained=rest)


def speedup(model: Model, rates: Rates, plan: Step, recipe: RecipeCost, converted: Collection[str]) -> Ratio:
    """Step time in bf16 over step time in FP8, with its interval."""
    return with_interval(lambda at: step_ratio(model, at, plan, recipe, converted), rates)


def with_interval(value: Callable[[Rates], float], rates: Rates) -> Ratio:
    """A positive figure and the interval that the uncertainty of the rates gives it."""
    middle = value(rates)
    variance = sum(
        (math.log(value(rates.shifted(name, 1.0)) / value(rates.shifted(name, -1.0))) / 2) ** 2
        for name in rates.figures
    )
    half = math.exp(_CONFIDENCE * math.sqrt(variance))
    return Ratio(middle, middle / half, middle * half)


def sends_codes(recipe: RecipeCost | None, plan: Step) -> bool:
    """Whether FSDP gathers the converted layers' weights in FP8."""
    return recipe is not None and recipe.gathered_weight is not None and plan.dp > 1 and plan.gather_fp8


def as_sent(recipe: RecipeCost, plan: Step) -> RecipeCost:
    """The recipe with the cast of the weight that it then needs: in order that of a shard alone, as what is gathered is codes."""
    whole = recipe.gathered_weight
    if whole is None or not sends_codes(recipe, plan):
        return recipe
    shard = replace(whole, streamed=whole.streamed / plan.shards)
    return replace(recipe, casts={**recipe.casts, "weight": shard})


def sharding(model: Model, rates: Rates, plan: Step, busy: Pass, coded: float | None = None) -> float:
    """What FSDP adds to the step: what `busy` does not hide, the first gather and last reduction, and its copies.

    With replicas (HSDP) what is reduced is then reduced among them too. FSDP2 copies what was gathered into each
    parameter (read and written, twice a pass), and gradients into what is reduced, between the products
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13: split_with_sizes_copy, chunk_cat). In a pipeline
    weights are gathered once a step and kept (torchtitan, `fsdp_reshard_after_forward` by default).

    Args:
        model: of one GPU.
        rates: of the GPU.
        plan: how it is trained.
        busy: what keeps the GPU busy in one microbatch, other than what is asked for here.
        coded: elements of weights that go around in FP8; None: none do, and nothing agrees on scales.
    """
    if plan.dp == 1:
        return 0.0
    calls = model.blocks + 1  # a collective of each block and of what is outside of blocks
    shards, across = (plan.groups[name] for name in ("shard", "replicas"))

    def sent(kind: str, payload: float, group: GpuGroup) -> float:
        return seconds(kind, payload, group, rates["link"], rates["network"], calls)

    weights, gradients = _BF16 * model.parameters, plan.gradient_bytes * model.parameters
    gathered = weights - (coded or 0.0) * (_BF16 - _FP8)
    slowed = (coded or 0.0) * _FP8 * (1 / rates["codes"] - 1)
    gather = sent(ALL_GATHER, gathered + slowed, shards)
    reduce = sent(REDUCE_SCATTER, gradients, shards)
    if plan.replicas > 1:
        reduce += sent(ALL_REDUCE, gradients * plan.replicas / plan.dp, across)
    again = plan.pp == 1
    gathers = plan.accumulation if again else 1
    reductions = plan.accumulation if plan.reduce_each else 1
    one_gather = 2 * gathered / rates["bandwidth"] if plan.copied else 0.0
    one_reduction = (weights + gradients) / rates["bandwidth"] if plan.copied else 0.0
    first, last = gather / calls, reduce / calls
    kept_back, hides = (gather, busy.backward + one_gather) if again else (0.0, busy.backward)
    waits = gathers * max(0.0, gather - first - busy.forward - one_gather)
    waits += reductions * max(0.0, kept_back + reduce - last - hides - one_reduction)
    if again:
        waits += (plan.accumulation - reductions) * max(0.0, kept_back - hides)
    copies = gathers * one_gather * (1 + again) + reductions * one_reduction
    scales = 0.0 if coded is None else small_all_reduce(shards)
    return gathers * first + reductions * last + scales + copies + waits


def _tensor_parallel(
    exchanges: Sequence[GroupExchange],
    rates: Rates,
    plan: Step,
    recipe: RecipeCost | None,
    converted: int,
    times: Mapping[str, Mapping[str, float]],
) -> Pass:
    """What tensor parallelism adds to a microbatch: each input is gathered and each result scattered, and backward the other way.

    Of a converted layer's three tensors two have scales that go across the split; their amaxes are agreed upon, one by
    one: one in each pass. `times` has seconds of the products of each layer of this GPU; exchanges of others are not its own.
    """
    if plan.tp == 1:
        return Pass(0.0, 0.0)
    coded = recipe is not None and plan.tp_gather_fp8 and recipe.gathered_weight is not None
    overlaps = recipe is None or recipe.fuses_gathers
    group = plan.groups["tp"]
    agreed = small_all_reduce(group) * converted if recipe is not None else 0.0
    forward = backward = agreed
    for exchange in exchanges:
        if not all(fqn in times for fqn in exchange.layers):
            continue
        for role, gathers in (("output", exchange.gathers), ("grad_input", not exchange.gathers)):
            payload = exchange.sent * (_FP8 / _BF16 / rates["codes"] if coded and gathers else 1.0)
            kind = ALL_GATHER if gathers else REDUCE_SCATTER
            once = seconds(kind, payload, group, rates["link"], rates["network"])
            if plan.tp_overlap and (overlaps or not gathers):
                once = max(0.0, once - sum(times[fqn][role] for fqn in exchange.layers))
            forward += once * (role == "output")
            backward += once * (plan.again.matmul if role == "output" else 1.0)
    return Pass(forward, backward)


def pipeline(model: Model, rates: Rates, plan: Step, busy: Pass) -> float:
    """What a pipeline adds to the step: GPUs that wait while it fills and drains, and what goes between stages.

    1F1B idles for (p - 1) microbatches of a stage; interleaved, with v parts of the model on a GPU, for (p - 1) / v
    (Narayanan et al., arXiv:2104.04473, section 2.2). While it fills and drains nothing hides what is sent; in between a
    microbatch of the stage does.

    Args:
        model: of one GPU of the slowest stage.
        rates: of the GPU.
        plan: how it is trained.
        busy: seconds of one microbatch of that stage, tensor parallelism's exchanges included.
    """
    if plan.pp == 1:
        return 0.0
    pair = GpuGroup.of(2, plan.dp * plan.tp, plan.node)
    speed = rates["link"] if pair.nodes == 1 else rates["network"]
    once = _BF16 * model.tokens * model.width / plan.tp / speed
    bubble = (plan.pp - 1) / plan.virtual * busy.total
    ends = 2 * (plan.pp * plan.virtual - 1) * once
    between = 2 * plan.accumulation * plan.virtual * max(0.0, once - busy.total / 2 / plan.virtual)
    return bubble + ends + between
