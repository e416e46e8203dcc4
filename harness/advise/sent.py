"""What communication adds to a step: what no computation hides, of sharded weights, of split layers, of a pipeline.

FSDP gathers the weights before each pass over the model and reduces gradients in the backward pass. A gather of the forward
pass hides behind the forward pass alone, one of the backward pass and the reduction behind the backward pass; and not only
products hide them, but all that keeps the GPU's stream busy: FSDP2's copies and the exchanges of tensor parallelism
too, which go over NVLink where the shards of one weight lie on many nodes. A step can thus be bound by what is sent; then
nothing that makes products faster makes it faster, and only fewer bytes do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.machine.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Group,
    seconds,
    small_all_reduce,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.casts import RecipeCost
    from harness.advise.model import Model
    from harness.advise.plan import Plan
    from harness.advise.rates import Rates

_SCALES_A_LAYER = 2  # of a layer's three tensors, those whose scale goes across the split
_BF16, _FP8 = 2.0, 1.0  # bytes of an element


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one microbatch, forward and backward (what is run again is in the backward pass)."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)


def sends_codes(recipe: RecipeCost | None, plan: Plan) -> bool:
    """Whether FSDP gathers the converted layers' weights in FP8."""
    return recipe is not None and recipe.gathered_weight is not None and plan.dp > 1 and plan.gather_fp8


def as_sent(recipe: RecipeCost, plan: Plan) -> RecipeCost:
    """The recipe with the cast of the weight that it then needs: in order that of a shard alone, as what is gathered is codes."""
    if not sends_codes(recipe, plan) or recipe.gathered_weight is None:
        return recipe
    whole = recipe.gathered_weight
    shard = replace(whole, streamed=whole.streamed / plan.shards)
    return replace(recipe, casts={**recipe.casts, "weight": shard})


def gather_seconds(model: Model, rates: Rates, plan: Plan, fp8_weights: float = 0.0) -> float:
    """Seconds in which FSDP gathers the weights of one pass over the model once."""
    sent = _BF16 * (model.parameters - fp8_weights) + _FP8 * fp8_weights
    return _sharded(ALL_GATHER, sent, model, rates, plan)


def sharding(
    model: Model, rates: Rates, plan: Plan, recipe: RecipeCost | None, fp8_weights: float, busy: Pass
) -> float:
    """What FSDP adds to the step: what `busy` does not hide, the first gather and last reduction, and its copies.

    With replicas (HSDP) what is reduced is then reduced among them too. FSDP2 copies what was gathered into each
    parameter (read and written, twice a pass), and gradients into what is reduced, between the products
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, 2.13: split_with_sizes_copy, chunk_cat). In a pipeline
    weights are gathered once a step and kept (torchtitan, `fsdp_reshard_after_forward` by default).

    Args:
        model: of one GPU.
        rates: of the GPU.
        plan: how it is trained.
        recipe: of the converted layers; None: all in bf16.
        fp8_weights: elements of the converted layers' weights.
        busy: what keeps the GPU busy in one microbatch, other than what is asked for here.
    """
    if plan.dp == 1:
        return 0.0
    coded = fp8_weights if sends_codes(recipe, plan) else 0.0
    gather = gather_seconds(model, rates, plan, coded)
    gradients = plan.gradient_bytes * model.parameters
    reduce = _sharded(REDUCE_SCATTER, gradients, model, rates, plan)
    if plan.replicas > 1:
        across = Group.of(plan.replicas, plan.dp * plan.tp // plan.replicas, plan.node)
        shard = gradients * plan.replicas / plan.dp
        reduce += seconds(ALL_REDUCE, shard, across, rates["link"], rates["network"], model.blocks + 1)
    again = plan.pp == 1
    gathers = plan.accumulation if again else 1
    reductions = plan.accumulation if plan.reduce_each else 1
    one_gather = 2 * (_BF16 * model.parameters - coded) / rates["bandwidth"] if plan.copied else 0.0
    one_reduction = (_BF16 * model.parameters + gradients) / rates["bandwidth"] if plan.copied else 0.0
    first, last = gather / (model.blocks + 1), reduce / (model.blocks + 1)
    forward = max(0.0, gather - first - busy.forward - one_gather)
    kept_back = gather if again else 0.0
    hides = busy.backward + (one_gather if again else 0.0)
    without = max(0.0, kept_back - hides)
    reducing = max(0.0, kept_back + reduce - last - hides - one_reduction)
    copies = gathers * one_gather * (2 if again else 1) + reductions * one_reduction
    scales = small_all_reduce(_shards(plan)) if coded or sends_codes(recipe, plan) else 0.0
    ends = gathers * first + reductions * last
    waits = gathers * forward + reductions * reducing
    if again:
        waits += (plan.accumulation - reductions) * without
    return ends + scales + copies + waits


def tensor_parallel(
    rates: Rates,
    plan: Plan,
    recipe: RecipeCost | None,
    converted: int,
    times: Mapping[str, Mapping[str, float]],
) -> Pass:
    """What tensor parallelism adds to a microbatch: each input is gathered and each result scattered, and backward the other way.

    Amaxes of split tensors are agreed upon, one by one.

    Args:
        rates: of the GPU.
        plan: how it is trained.
        recipe: of the converted layers; None: all in bf16.
        converted: how many.
        times: seconds of the products of each layer of this GPU; exchanges of other layers are not its own.
    """
    fp8 = recipe is not None
    small = _SCALES_A_LAYER * converted if fp8 else 0
    coded = recipe is not None and plan.tp_gather_fp8 and recipe.gathered_weight is not None
    halved = _FP8 / _BF16 if coded else 1.0
    group = Group.of(plan.tp, 1, plan.node)
    forward = backward = 0.0
    for exchange in plan.exchanges:
        if not all(fqn in times for fqn in exchange.layers):
            continue
        for role, gathering in (("output", exchange.gathers), ("grad_input", not exchange.gathers)):
            kind, payload = (
                (ALL_GATHER, exchange.sent * halved) if gathering else (REDUCE_SCATTER, exchange.sent)
            )
            once = seconds(kind, payload, group, rates["link"], rates["network"])
            if plan.tp_overlap and not (gathering and recipe is not None and not recipe.fuses_gathers):
                once = max(0.0, once - sum(times[fqn][role] for fqn in exchange.layers))
            if role == "output":
                forward += once
                backward += plan.again.matmul * once
            else:
                backward += once
    agreed = small * small_all_reduce(group) / _SCALES_A_LAYER
    return Pass(forward + agreed, backward + agreed)


def pipeline(model: Model, rates: Rates, plan: Plan, busy: Pass) -> float:
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
    pair = Group.of(2, plan.dp * plan.tp, plan.node)
    speed = rates["link"] if pair.nodes == 1 else rates["network"]
    once = _BF16 * model.tokens * model.width / plan.tp / speed
    bubble = (plan.pp - 1) / plan.virtual * busy.total
    ends = 2 * (plan.pp * plan.virtual - 1) * once
    between = 2 * plan.accumulation * plan.virtual * max(0.0, once - busy.total / 2 / plan.virtual)
    return bubble + ends + between


def _shards(plan: Plan) -> Group:
    """The GPUs over which one copy of the weights lies."""
    return Group.of(plan.shards, plan.tp, plan.node)


def _sharded(kind: str, payload: float, model: Model, rates: Rates, plan: Plan) -> float:
    """Seconds of a collective of each block and of what is outside of blocks."""
    return seconds(kind, payload, _shards(plan), rates["link"], rates["network"], model.blocks + 1)
