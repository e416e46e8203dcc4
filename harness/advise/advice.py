"""The whole of an advice: recipes, decision, reasons in the words of those who ask, filter, thresholds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.advise import decide
from harness.advise.casts import TENSORS
from harness.advise.fits import TOO_LARGE
from harness.advise.library_names import FP8CORE, not_by_default
from harness.store.text import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.decide import RecipeAdvice
    from harness.advise.fits import Memory
    from harness.advise.measured import Check
    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.advise.step import Parts, Plan
    from harness.machine.hardware import Device

_END_IN_BF16 = "cooldown_bf16:0.1"
_COARSE = ("tensorwise", "delayed")


@dataclass(frozen=True, slots=True)
class Reason:
    """One of the questions that decide, what is found here, and what it speaks for: "on", "off" or ""."""

    question: str
    finding: str
    speaks_for: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything that `python -m harness advise` says.

    Attributes:
        model, device, rates, plan: what was asked; `model` is one GPU's part.
        options: every recipe, in the order of fp8core's table.
        chosen: the one to take, or the best of those that do not pay.
        parts: of the step in bf16, and with the chosen layers in FP8.
        pays_from: tokens of a pass; None: never.
        gather_from: GPUs at which FSDP's communication adds more than 5 % to the bf16 step; None: never.
        reasons: why.
        warnings: what a reader must know before believing it.
        checks: predictions beside stored measurements of this GPU.
        library: whose kernels are assumed.
        schedule: of precisions, which goes with the recipe; "" for none.
        memory: what the step takes; None where it was not asked.
        made_up: batches that nobody named, and what stands for them; "" where none are.
    """

    model: Model
    device: Device
    rates: Rates
    plan: Plan
    options: tuple[RecipeAdvice, ...]
    chosen: RecipeAdvice
    parts: tuple[Parts, Parts]
    pays_from: int | None
    gather_from: int | None
    reasons: tuple[Reason, ...]
    checks: tuple[Check, ...] = ()
    library: str = FP8CORE
    schedule: str = ""
    memory: Memory | None = None
    made_up: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def decision(self) -> str:
        """ "on", "only these layers", "off" or "can't tell": of the step's time alone."""
        return self.chosen.verdict

    @property
    def answer(self) -> str:
        """The decision, or "does not fit": what nobody can run is neither on nor off."""
        too_large = self.memory is not None and self.memory.word == TOO_LARGE
        return TOO_LARGE if too_large else self.decision

    @property
    def fp8_all_gather(self) -> bool:
        """FSDP gathers the weights of the converted layers in FP8."""
        return self.decision in decide.POSITIVE and self.chosen.fp8_all_gather

    @property
    def tp_fp8_all_gather(self) -> bool:
        """To split layers by the `Float8ColwiseParallel` styles, which gather activations in FP8."""
        return self.decision in decide.POSITIVE and self.chosen.tp_fp8_all_gather

    @property
    def left_out(self) -> Mapping[str, tuple[str, ...]]:
        """What the filter leaves in bf16: last words of names, and whole names."""
        return decide.module_filter(
            self.model, self.chosen.converted if self.decision in decide.POSITIVE else frozenset()
        )


def advice(
    model: Model,
    device: Device,
    rates: Rates,
    plan: Plan,
    options: Sequence[RecipeAdvice],
    *,
    careful: bool,
    checks: Sequence[Check] = (),
    library: str = FP8CORE,
) -> Advice:
    """Puts an advice together; `careful`: the last of the evaluation loss counts more than speed."""
    by_default = [o for o in options if len(options) == 1 or not not_by_default(library, o.recipe.name)]
    chosen = decide.best(by_default, careful)
    pays = decide.pays_from(model, rates, plan, chosen.recipe) if not chosen.unavailable else None
    return Advice(
        model=model,
        device=device,
        rates=rates,
        plan=plan,
        options=tuple(options),
        chosen=chosen,
        parts=decide.parts_of(model, rates, plan, chosen),
        pays_from=pays,
        gather_from=decide.gather_matters_from(model, rates, replace(plan, accumulation=1)),
        reasons=_reasons(model, device, rates, plan, chosen, careful),
        checks=tuple(checks),
        library=library,
        schedule=_END_IN_BF16 if careful and library == FP8CORE and chosen.verdict in decide.POSITIVE else "",
    )


def _reasons(
    model: Model, device: Device, rates: Rates, plan: Plan, chosen: RecipeAdvice, careful: bool
) -> tuple[Reason, ...]:
    return (
        _generation(device, rates),
        _width(model, rates, chosen),
        _dense(model),
        _split(model, plan, chosen),
        _communication(model, rates, plan, chosen),
        _loss(chosen, careful),
    )


def _generation(device: Device, rates: Rates) -> Reason:
    if not rates.has_fp8:
        return Reason(
            "GPU generation",
            f"{device.key} has no FP8 matrix units: FP8 would be emulated, and slower",
            "off",
        )
    ratio = rates["fp8"] / rates["bf16"]
    kind = ", ".join(dict.fromkeys(rates.figures[rate].kind for rate in ("fp8", "bf16")))
    return Reason(
        "GPU generation",
        f"{device.key} multiplies FP8 {ratio:.2f} times as fast as bf16 ({kind}); its data sheet says "
        f"{device.tflops.get('fp8', 0) / device.tflops['bf16']:.2f}",
        "on",
    )


def _width(model: Model, rates: Rates, chosen: RecipeAdvice) -> Reason:
    casts = chosen.recipe.casts
    b = sum(casts[tensor].total for tensor in TENSORS) / len(TENSORS)
    needed = decide.break_even_width(rates, model.tokens, b)
    width = f"most products are {model.width} wide"
    if needed == float("inf"):
        return Reason(
            "dim", f"{width}; with {model.tokens} tokens no width pays for casts of {b:.1f} B/element", "off"
        )
    found = f"{width}; with {model.tokens} tokens and casts of {b:.1f} B/element FP8 pays from {needed:.0f}"
    return Reason("dim", found, "on" if model.width > needed else "off")


def _dense(model: Model) -> Reason:
    linear = sum(layer.flops for layer in model.layers)
    experts, attention = 3 * model.other, 3 * model.attention
    whole = linear + experts + attention
    share = linear / whole if whole else 0.0
    if not model.whole:
        return Reason("dense or MoE", "only the Linear layers are known: the step is an upper bound", "")
    kind = "MoE" if model.experts else "dense"
    stays = f", {experts / whole:.0%} in grouped experts, which stay in bf16" if model.experts else ""
    found = (
        f"{kind}: {share:.0%} of its FLOPs are in Linear layers{stays}, {attention / whole:.0%} in attention"
    )
    return Reason("dense or MoE", found, "on" if share > 0.5 else "off")


def _split(model: Model, plan: Plan, chosen: RecipeAdvice) -> Reason:
    if plan.tp == 1:
        return Reason("TP", "layers are whole (tp=1)", "")
    narrow = min((layer for layer in chosen.layers), key=lambda advice: advice.ratio.value, default=None)
    if narrow is None:
        return Reason("TP", f"tp={plan.tp}", "")
    layer = narrow.layer
    return Reason(
        "TP",
        f"tp={plan.tp} leaves layers as narrow as {layer.fqn}, {layer.K} to {layer.N}: {narrow.ratio.value:.2f}x",
        "on" if narrow.ratio.value > 1 else "off",
    )


def _communication(model: Model, rates: Rates, plan: Plan, chosen: RecipeAdvice) -> Reason:
    """What is sent and not hidden, in bf16 and as chosen."""
    question = "communication"
    if plan.dp == plan.tp == plan.pp == 1:
        return Reason(question, "nothing is sent (one GPU)", "")
    bf16, fp8 = decide.parts_of(model, rates, plan, chosen)
    share = bf16.communication / bf16.total
    found = (
        f"exposed {number(1e3 * bf16.communication)} of {number(1e3 * bf16.total)} ms in bf16 ({share:.0%})"
    )
    if not chosen.converted:
        return Reason(question, found, "off" if share > decide.EXPOSED else "")
    found += f", {number(1e3 * fp8.communication)} of {number(1e3 * fp8.total)} ms in FP8"
    if chosen.fp8_all_gather:
        found += "; FSDP gathers weights in FP8 (fp8_all_gather), half the bytes"
    elif plan.dp > 1:
        found += "; FSDP gathers weights in bf16"
        if chosen.recipe.gathered_weight is None:
            found += f", as {chosen.recipe.name} casts each along both axes"
    if chosen.tp_fp8_all_gather:
        found += "; tensor parallelism gathers inputs in FP8 (Float8ColwiseParallel)"
    if chosen.fp8_all_gather:
        return Reason(question, found, "on")
    return Reason(question, found, "off" if share > decide.EXPOSED else "")


def _loss(chosen: RecipeAdvice, careful: bool) -> Reason:
    name = chosen.recipe.name
    coarse = name in _COARSE
    scales = "one scale a tensor, the coarsest" if coarse else "scales of rows or blocks"
    if careful:
        found = f"it counts (priority=loss): {name} has {scales}; end in bf16 by schedule={_END_IN_BF16}"
    else:
        found = (
            f"{name} has {scales}; whether it trains the same is measured, not predicted: sweep=divergence"
        )
    return Reason("eval loss", found, "off" if coarse and careful else "")


def way_out(model: Model, device: Device, rates: Rates, plan: Plan) -> str:
    """What to measure where the prediction cannot tell."""
    train = f"`python -m harness sweep=train model={model.name}`"
    if plan.dp * plan.tp * plan.pp > 1:
        train = "`harness.ab` in your own loop on these GPUs"
    if rates.figures["fp8"].kind == "measured":
        return f"measure the step itself on that GPU by {train}"
    return f"measure the {device.key} by `python -m harness sweep=ceilings` and name it by runs=RUN, or the step by {train}"
