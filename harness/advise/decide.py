"""The decision: FP8 on, off, or only for some layers; with which recipe; and from how many tokens it pays.

A layer is converted if FP8 is predicted to be at least `LAYER_GAIN` times as fast, its casts counted; layers that read
one cast of their input are judged together for it. So the filter can never make a model slower than bf16 by the same
prediction. The advice is "on" only where the whole interval of the step's ratio lies above 1, and it gains `STEP_GAIN` or more; it is
"off" where nothing is predicted to gain, or at most less than that, or the loss is known to be worse; in between nobody can tell before something is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.advise.layer import layer_cost
from harness.advise.model import head_in_fp8
from harness.advise.step import (
    Ratio,
    as_sent,
    sends_codes,
    speedup,
    step_cost,
    step_ratio,
    with_interval,
)
from harness.store.tables import rows_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.advise.casts import RecipeCost
    from harness.advise.layer import LayerCost
    from harness.advise.losses import Loss
    from harness.advise.model import Linear, Model
    from harness.advise.rates import Rates
    from harness.training.step import Step

# Of the steps that the advice is "on" for at least 95 % stay at 0.98 of bf16 or above where the rates err as they say, drawn
# ones and those of each named model: `python reports/studies/margins.py`; docs/advise-accuracy.md has what it found.
LAYER_GAIN = 1.03
STEP_GAIN = 1.02
ON, SOME, OFF, UNDECIDED = "on", "only these layers", "off", "can't tell"
GATHER = "gather in FP8"  # the layers are converted for what is sent, and gain nothing by themselves
POSITIVE = (ON, SOME, GATHER)
# What torch.compile makes of what is gathered under tensor parallelism is not modelled for rowwise products, so that such a
# step may be as slow as the slowest that was published.
_ROWS_SPLIT = min(float(row["measured"]) for row in rows_beside(__file__, "rows_split.csv"))
EXPOSED = 0.05  # of the step: communication that matters
# docs/advise.md has why, with its sources
HEAD = "the output head, whose loss in FP8 was not judged"
_SLOW = 0.9  # share of the rate of tensorwise products that is worth a word
_MOST_TOKENS = 2**22
_MOST_GPUS = 2**16
_NOTHING = Ratio(1.0, 1.0, 1.0)
_WAITS = {
    "communication": "the step waits for communication",
    "launches": "the step waits for the CPU",
    "": "the step as a whole gains nothing",
}


@dataclass(frozen=True, slots=True)
class LayerAdvice:
    """One layer under one recipe.

    Attributes:
        layer: which.
        cost: of its GEMMs and casts, without what other layers share of its input's cast.
        ratio: bf16 over FP8, its own cast of the input included.
        converted: take FP8.
        reason: why not; "" if it is converted.
    """

    layer: Linear
    cost: LayerCost
    ratio: Ratio
    converted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RecipeAdvice:
    """One recipe for the whole model.

    Attributes:
        recipe: which.
        layers: each of the model's.
        plan: how it is trained, with what goes around in FP8.
        step: bf16 step over FP8 step with the chosen layers; 1 where there are none.
        everything: the same with every layer that can be converted.
        unavailable: why this GPU cannot run it; "" if it can.
        by_gather: the chosen layers and their casts take longer than in bf16: what is gained is what goes around in FP8.
        loss: what is known of its loss; None: nothing, or nobody asked.
    """

    recipe: RecipeCost
    layers: tuple[LayerAdvice, ...]
    plan: Step
    step: Ratio
    everything: Ratio
    unavailable: str = ""
    by_gather: bool = False
    loss: Loss | None = None

    @property
    def fp8_all_gather(self) -> bool:
        """FSDP gathers the weights of the converted layers in FP8."""
        return sends_codes(self.recipe, self.plan)

    @property
    def tp_fp8_all_gather(self) -> bool:
        """Tensor parallelism gathers the inputs of the converted layers in FP8."""
        return self.plan.tp > 1 and self.plan.tp_gather_fp8

    @property
    def converted(self) -> frozenset[str]:
        """Names of the layers to convert."""
        return frozenset(advice.layer.fqn for advice in self.layers if advice.converted)

    @property
    def verdict(self) -> str:
        """The word `by_time`, and "off" where that is positive and the loss is known to be worse."""
        return OFF if self.lossy else self.by_time

    @property
    def lossy(self) -> bool:
        """Whether it would be taken for its time though its loss is known to be worse."""
        return self.by_time in POSITIVE and self.loss is not None and self.loss.fails

    @property
    def by_time(self) -> str:
        """One of `POSITIVE`, "off" or "can't tell": never positive where the interval of the step contains 1."""
        found = OFF if self.unavailable or not self.converted else verdict(self.step)
        if found != ON:
            return found
        if self.by_gather:
            return GATHER
        return ON if all(a.converted for a in self.layers if not barred(a.layer, self.recipe)) else SOME

    @property
    def narrowest(self) -> LayerAdvice | None:
        """The layer that gains least."""
        return min(self.layers, key=lambda one: one.ratio.value, default=None)

    @property
    def gains(self) -> str:
        """What products gain and casts take, of the layers that can run the recipe; "" where none can."""
        runs = [a.cost for a in self.layers if not barred(a.layer, self.recipe)]
        bf16, fp8, casts = (
            sum(sum(part.values()) for part in parts)
            for parts in ([c.bf16 for c in runs], [c.fp8 for c in runs], [c.casts for c in runs])
        )
        return f"products {bf16 / fp8:.2f}x, with casts {bf16 / (fp8 + casts):.2f}x" if runs else ""

    @property
    def why_off(self) -> str:
        """Why the recipe is not on although this GPU runs it; "" otherwise."""
        if self.verdict in POSITIVE or self.unavailable or not self.gains:
            return ""
        if self.lossy and self.loss:
            return f"{OFF}: its loss is worse ({self.loss.gap}, {self.loss.source})"
        slow = self.recipe.product_share
        slower = f", as they run at {slow:.0%} of tensorwise's rate" if slow < _SLOW else ""
        return f"{self.verdict}: {self.gains}{slower}"


def verdict(step: Ratio) -> str:
    """`ON`, `OFF` or `UNDECIDED` of a step's ratio: on only where its whole interval lies above 1."""
    if step.high < STEP_GAIN or (step.low > 1 and step.value < STEP_GAIN):
        return OFF
    return ON if step.low > 1 else UNDECIDED


def advise(
    model: Model,
    rates: Rates,
    plan: Step,
    recipe: RecipeCost,
    unavailable: str = "",
    fp8_all_gather: bool | None = False,
) -> RecipeAdvice:
    """What one recipe gives.

    Args:
        model: one GPU's part.
        rates: of the GPU.
        plan: how it is trained; what goes around in FP8 is asked by `fp8_all_gather`.
        recipe: which.
        unavailable: why this GPU cannot run it; "" if it can.
        fp8_all_gather: what is gathered goes around in FP8 (FSDP's weights, tensor parallelism's inputs); None: where the
            recipe can and the step gains by it.
    """
    kept = replace(plan, gather_fp8=False, tp_gather_fp8=False)
    if not rates.has_fp8:
        no_units = f"{rates.name} has no FP8 matrix units"
        return RecipeAdvice(recipe, (), kept, _NOTHING, _NOTHING, no_units)
    coded = replace(kept, gather_fp8=True, tp_gather_fp8=kept.tp > 1)
    can = recipe.gathered_weight is not None and (kept.dp > 1 or kept.tp > 1)
    plans = {True: [coded], False: [kept], None: [kept, coded]}[fp8_all_gather if can else False]
    filters = {each: choose(model, rates, each, recipe) for each in plans}
    plan = max(plans, key=lambda each: step_ratio(model, rates, each, recipe, filters[each]))
    chosen, every, sent = filters[plan], able(model, recipe), as_sent(recipe, plan)
    waits = "" if chosen else _what_waits(model, rates, plan, recipe)
    ratios: dict[tuple[int, int, int], Ratio] = {}  # blocks repeat the same few sizes
    layers = []
    for layer in model.layers:
        size = (layer.K, layer.N, layer.tokens)
        if size not in ratios:

            def value(at: Rates, layer: Linear = layer) -> float:
                return layer_cost(layer, sent, at).speedup

            ratios[size] = with_interval(value, rates)
        ratio, converted = ratios[size], layer.fqn in chosen
        why = "" if converted else _why_not(layer, recipe, ratio, waits)
        layers.append(LayerAdvice(layer, layer_cost(layer, sent, rates), ratio, converted, why))
    costs = [layer_cost(layer, recipe, rates) for layer in model.layers if layer.fqn in chosen]
    bf16 = sum(sum(cost.bf16.values()) for cost in costs)
    fp8 = sum(sum(part.values()) for cost in costs for part in (cost.fp8, cost.casts))
    step, everything = (
        speedup(model, rates, plan, recipe, names) if names else _NOTHING for names in (chosen, every)
    )
    if not model.whole:
        # What is left out takes as long in both: the step gains at most this, and perhaps nothing.
        step, everything = (Ratio(each.value, min(1.0, each.low), each.value) for each in (step, everything))
    elif plan.tp > 1 and not recipe.fuses_gathers:
        step, everything = (replace(each, low=min(each.low, _ROWS_SPLIT)) for each in (step, everything))
    return RecipeAdvice(
        recipe, tuple(layers), plan, step, everything, unavailable, plan == coded and bf16 <= fp8
    )


def able(model: Model, recipe: RecipeCost) -> frozenset[str]:
    """Names of the layers that can run a recipe, the output head among them."""
    return frozenset(layer.fqn for layer in head_in_fp8(model).layers if not barred(layer, recipe))


def barred(layer: Linear, recipe: RecipeCost) -> str:
    """Why a layer stays in high precision whatever it would gain; "" if nothing bars it."""
    if layer.tokens == 0:
        return "not used in the forward pass"
    return layer.barred.get(recipe.name, HEAD if layer.is_head else "")


def choose(
    model: Model, rates: Rates, plan: Step, recipe: RecipeCost, gain: float = LAYER_GAIN
) -> frozenset[str]:
    """Names of the layers that FP8 makes faster by `gain`, casts counted and shared ones counted once.

    () if the step as a whole would not be faster: launches and communication can eat what the layers gain.
    """
    sent = as_sent(recipe, plan)
    groups: dict[int, list[Linear]] = {}
    for i, layer in enumerate(model.layers):
        if not barred(layer, recipe):
            groups.setdefault(layer.input_id if recipe.shares_input else -1 - i, []).append(layer)
    found: frozenset[str] = frozenset()
    for members in groups.values():
        winners, bf16, fp8, shared = set(), 0.0, 0.0, 0.0
        for layer in members:
            # Each must win without the shared cast, all together with it.
            before, after, casts = layer_cost(layer, sent, rates).recomputed(plan.again.matmul)
            after += casts["grad_output"] + casts["weight"]
            shared = max(shared, casts["input"])
            if before >= gain * after:
                winners.add(layer.fqn)
                bf16, fp8 = bf16 + before, fp8 + after
        if winners and bf16 >= gain * (fp8 + shared):
            found |= winners
    coded = sends_codes(recipe, plan)
    if not found and not coded:
        return found
    total = step_cost(model, rates, plan, recipe, found)
    if total.launches or coded:
        # The CPU is late: launches of a layer's casts can cost more than its products bring. Or the step waits for what is
        # sent: a layer that loses by itself can gain by fewer bytes.
        for size in dict.fromkeys((la.K, la.N) for la in sorted(model.layers, key=lambda la: la.K * la.N)):
            alike = {la.fqn for la in model.layers if size == (la.K, la.N) and not barred(la, recipe)}
            for other in [found - alike, found | alike] if coded else [found - alike]:
                cost = step_cost(model, rates, plan, recipe, other) if other != found else total
                if cost.total < total.total:
                    found, total = other, cost
    # A step that takes exactly as long waits for something else; rounding is no gain
    return found if total.total < step_cost(model, rates, plan, None).total * (1 - 1e-9) else frozenset()


def _what_waits(model: Model, rates: Rates, plan: Step, recipe: RecipeCost) -> str:
    """Why a step gains nothing although layers of it do: "communication" or "launches" of the CPU; "" if neither."""
    bf16 = step_cost(model, rates, plan, None)
    fp8 = step_cost(model, rates, plan, recipe, able(model, recipe))
    gained = bf16.linear - fp8.linear - fp8.casts
    later, worst = max(
        (fp8.communication - bf16.communication, "communication"), (fp8.launches - bf16.launches, "launches")
    )
    return worst if gained > 0 and later > gained / 2 else ""


def _why_not(layer: Linear, recipe: RecipeCost, ratio: Ratio, waits: str) -> str:
    if never := barred(layer, recipe):
        return never.split(";")[0].split(", which")[0]
    if ratio.value < 1:
        return "casts cost more than products gain"
    return f"gains less than {LAYER_GAIN - 1:.0%}" if ratio.value < LAYER_GAIN else _WAITS[waits]


def best(options: Sequence[RecipeAdvice], careful: bool) -> RecipeAdvice:
    """The recipe to take: the fastest; or, where the last of the loss counts, the fastest of those with fine scales.

    Among those within `STEP_GAIN` of the fastest the earlier one in the table stands: the simpler one.
    """
    usable = [o for o in options if not o.unavailable] or list(options)
    if careful:
        usable = [o for o in usable if not o.recipe.one_scale and o.verdict != OFF] or usable
    for words in (POSITIVE, (UNDECIDED,)):
        if found := [o for o in usable if o.verdict in words]:
            usable = found
            break
    top = max(option.step.value for option in usable)
    return next(option for option in usable if option.step.value >= top / STEP_GAIN)


def pays_from(model: Model, rates: Rates, plan: Step, recipe: RecipeCost) -> int | None:
    """Fewest tokens in a pass of one GPU at which the step gains `STEP_GAIN`, to 5 %; None if it never does."""

    def gains(tokens: int) -> bool:
        scaled = model.with_tokens(tokens)
        chosen = choose(scaled, rates, plan, recipe)
        return bool(chosen) and step_ratio(scaled, rates, plan, recipe, chosen) >= STEP_GAIN

    top = _doubled(gains, 16, _MOST_TOKENS)
    if top is None or top == 16:
        return top
    below = top // 2
    while top - below > max(16, below // 20):
        middle = (below + top) // 32 * 16
        below, top = (below, middle) if gains(middle) else (middle, top)
    return top


def gather_matters_from(model: Model, rates: Rates, plan: Step) -> int | None:
    """Fewest GPUs at which FSDP's communication adds more than 5 % to the bf16 step; None if that never happens."""

    def matters(gpus: int) -> bool:
        parts, alone = (step_cost(model, rates, replace(plan, dp=dp, replicas=1), None) for dp in (gpus, 1))
        return parts.communication - alone.communication > EXPOSED * parts.total

    return _doubled(matters, 2, _MOST_GPUS)


def _doubled(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The first of low, twice that, and so on to `high`, for which a condition holds."""
    return next((n for i in range((high // low).bit_length()) if holds(n := low * 2**i)), None)


def module_filter(model: Model, converted: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """What to leave out, in the shortest form: "words" last words of names, "names" whole names.

    A last word (`k` of `layers.3.attention.k`) stands for all layers that end in it; names stand where only some do.
    """
    taken = {layer.word for layer in model.layers if layer.fqn in converted}
    left = [layer for layer in model.layers if layer.fqn not in converted]
    words = dict.fromkeys(layer.word for layer in left if layer.word not in taken)
    return {"words": tuple(words), "names": tuple(layer.fqn for layer in left if layer.word in taken)}
