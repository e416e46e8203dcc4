"""The whole of an advice, one record: recipes, decision, reasons, filter, thresholds. `harness.advise.views` shows it."""

from __future__ import annotations

import html
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.advise import decide, fp8_break_even
from harness.advise.casts import ENGINE, FP8CORE, provenance
from harness.advise.memory import TOO_LARGE
from harness.advise.rates import MEASURED
from harness.advise.step import Ratio
from harness.store import printer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.decide import LayerAdvice, RecipeAdvice
    from harness.advise.four_bits import FourBitEvidence
    from harness.advise.memory import Memory
    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.advise.step import Parts
    from harness.machine.hardware import Device
    from harness.training.step import Step

TRUSTED = (0.8, 1.25)
_END_IN_BF16 = "cooldown_bf16:0.1"


@dataclass(frozen=True, slots=True)
class Check:
    """One prediction and its measurement.

    Attributes:
        what: "product" (milliseconds), "layer" or "step" (speedups).
        case: sizes or model.
        arm: what ran.
        predicted, measured: in the same unit.
        run_id: of the measurement.
        low, high: of the prediction's interval, 95 %; NaN where it has none.
    """

    what: str
    case: str
    arm: str
    predicted: float
    measured: float
    run_id: str
    low: float = math.nan
    high: float = math.nan

    @property
    def inside(self) -> bool:
        """The measurement lies in the prediction's interval."""
        return self.low <= self.measured <= self.high

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def trusted(self) -> bool:
        """The prediction lies within `TRUSTED` of the measurement."""
        return TRUSTED[0] <= self.predicted / self.measured <= TRUSTED[1]


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
        careful: the last of the evaluation loss counts more than speed.
        checks: predictions beside stored measurements of this GPU.
        library: whose kernels are assumed.
        with_head: the step with the output head in FP8 too; None where no head is left out, or it brings nothing.
        memory: what the step takes; None where it was not asked.
        made_up: batches that nobody named, and what stands for them; "" where none are.
        warnings: what a reader must know before believing it.
        four_bits: what is known of four bits; None where it was not asked.
        train_tokens: of the whole training; None: not known.
    """

    model: Model
    device: Device
    rates: Rates
    plan: Step
    options: tuple[RecipeAdvice, ...]
    chosen: RecipeAdvice
    parts: tuple[Parts, Parts]
    pays_from: int | None
    gather_from: int | None
    careful: bool = False
    checks: tuple[Check, ...] = ()
    library: str = FP8CORE
    with_head: Ratio | None = None
    memory: Memory | None = None
    made_up: str = ""
    warnings: tuple[str, ...] = ()
    four_bits: FourBitEvidence | None = None
    train_tokens: int | None = None

    @property
    def decision(self) -> str:
        """One of `decide.POSITIVE`, "off" or "can't tell": of the step's time, and of what is known of the loss."""
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
    def schedule(self) -> str:
        """Schedule of precisions that goes with the recipe; "" for none."""
        return (
            _END_IN_BF16
            if self.careful and self.library == FP8CORE and self.decision in decide.POSITIVE
            else ""
        )

    @property
    def left_out(self) -> Mapping[str, tuple[str, ...]]:
        """What the filter leaves in bf16: last words of names, and whole names."""
        return decide.module_filter(
            self.model, self.chosen.converted if self.decision in decide.POSITIVE else frozenset()
        )

    @property
    def flops(self) -> tuple[float, ...]:
        """Shares of the FLOPs in Linear layers, grouped experts and attention."""
        parts = (
            sum(layer.flops for layer in self.model.layers),
            3 * self.model.other,
            3 * self.model.attention,
        )
        return tuple(part / (sum(parts) or 1.0) for part in parts)

    @property
    def exposed(self) -> float:
        """Share of the bf16 step in which it waits for communication."""
        return self.parts[0].communication / self.parts[0].total

    @property
    def break_even(self) -> float:
        """Width K = N from which a layer pays for the mean bytes of its casts; inf if none does."""
        at = self.rates
        if not at.has_fp8:
            return math.inf
        machine = fp8_break_even.ReachedRates(at["bf16"], at["fp8"], at["bandwidth"], at.name)
        return machine.break_even(self.model.tokens, self.chosen.recipe.mean_bytes)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The questions that decide, in the words of those who ask."""
        from harness.advise.views import findings  # it shows the record that this is

        narrow, one_gpu = self.chosen.narrowest, self.plan.dp == self.plan.tp == self.plan.pp == 1
        coded = bool(self.chosen.converted) and self.chosen.fp8_all_gather
        speaks: dict[str, bool | None] = {
            "GPU generation": self.rates.has_fp8,
            "dim": self.model.width > self.break_even,
            "dense or MoE": self.flops[0] > 0.5 if self.model.whole else None,
            "TP": narrow.ratio.value > 1 if narrow is not None and self.plan.tp > 1 else None,
            "communication": coded if not one_gpu and (coded or self.exposed > decide.EXPOSED) else None,
            "eval loss": False if self.careful and self.chosen.recipe.one_scale else None,
        }
        words, found = {True: "on", False: "off", None: ""}, findings(self)
        return tuple(Reason(name, found[name], words[side]) for name, side in speaks.items())

    def _repr_html_(self) -> str:
        from harness.advise.views import AdviceView

        return f"<pre>{html.escape(printer.as_text(AdviceView(self)))}</pre>"

    def finding(self, question: str) -> str:
        """What is found of one of the questions."""
        return next(reason.finding for reason in self.reasons if reason.question == question)

    @property
    def not_measured(self) -> list[str]:
        """What the gain rests on and nobody measured."""
        parts = [provenance(self.library)] * self.rates.has_fp8
        if self.answer in decide.POSITIVE:
            here = "not run here: its library is absent"
            parts.append(
                f"the code below ({here})"
                if self.library == ENGINE
                else "the code on a GPU (tests run it on a CPU)"
            )
        figures = {n: f for n, f in self.rates.figures.items() if n in ("bf16", "fp8") and f.kind != MEASURED}
        if figures:
            parts.append(", ".join(f"{name} rate ({f.kind})" for name, f in sorted(figures.items())))
        elif self.rates.has_fp8 and self.plan.compiled:
            parts.append("casts as a compiled step fuses them (the interval is wider for it)")
        if not self.model.whole:
            parts.append("attention and all else but the Linear layers are left out")
        return parts

    @property
    def groups(self) -> list[tuple[str, int, LayerAdvice]]:
        """Layers that are alike in shape, last word, tokens and verdict: (name, how many, one of them)."""
        groups: dict[tuple[object, ...], list[LayerAdvice]] = {}
        for one in self.chosen.layers:
            la = one.layer
            key = (la.fqn.rsplit(".", 1)[-1], la.K, la.N, la.tokens, one.converted, one.reason)
            groups.setdefault(key, []).append(one)
        return [(_name(found), len(found), found[0]) for found in groups.values()]

    @property
    def worst_checks(self) -> list[Check]:
        """The checks, those that are furthest off first."""
        return sorted(self.checks, key=lambda check: -abs(math.log(check.predicted / check.measured)))

    @property
    def check_spreads(self) -> list[tuple[int, str, Ratio]]:
        """How many checks of a kind, which, and predicted over measured with the range that holds 95 %; of three and more."""
        found = []
        for what in ("product", "layer", "step"):
            logs = [math.log(check.predicted / check.measured) for check in self.checks if check.what == what]
            if len(logs) >= 3:
                mean, spread = statistics.fmean(logs), 2 * statistics.stdev(logs)
                found.append((len(logs), what, Ratio(*map(math.exp, (mean, mean - spread, mean + spread)))))
        return found


def _name(members: Sequence[LayerAdvice]) -> str:
    """attention.q for layers.0.attention.q and its like in other blocks: what stands behind the block's number."""
    first = members[0].layer.fqn
    parts = first.split(".")
    after = max((i + 1 for i, part in enumerate(parts) if part.isdigit()), default=0)
    return ".".join(parts[after:]) or first if len(members) > 1 else first
