"""Views of an advice: words for a terminal, tables, code, plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.advise import decide
from harness.advise.casts import not_by_default
from harness.advise.layer import gemm_sizes
from harness.advise.memory import GIB, MARGIN, TOO_LARGE
from harness.advise.printed_code import as_code
from harness.advise.rates import FIGURES, MEASURED
from harness.store import printer
from harness.store.text import number, plural, printable, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.advise.advice import Advice
    from harness.advise.four_bits import PublicComparison
    from harness.advise.losses import Loss
    from harness.advise.step import Ratio

_NAME = 16  # characters of a layer
_MOST_CHECKS = 12
_NO_WIDTH = 1e9
_INDENT = " " * 5
_NO_WAY = "none found by the model; a smaller model, more tensor parallelism, or a pipeline (pp=), of which no memory is predicted"
# The output head in torchtitan, transformers and nanoGPT, Megatron, GPT-NeoX, and here
HEADS = ("head", "lm_head", "output", "output_layer", "embed_out")
_PLAN = (
    "compiled accumulation dp replicas tp pp virtual node gather_fp8 copied reduce_each tp_gather_fp8 tp_overlap "
    "update_bytes gradient_bytes bf16_step_s"
)
_TONES: dict[str, printer.Tone] = {decide.ON: "good", decide.OFF: "bad", TOO_LARGE: "bad"}


@dataclass(frozen=True, slots=True)
class AdviceView:
    """An advice as a result of the printer; `full` has the tables behind it."""

    advice: Advice
    full: bool = False

    @property
    def tone(self) -> printer.Tone:
        """Good for "on"; bad for "off" and for what does not fit."""
        return _TONES.get(self.advice.answer, "")

    def lines(self) -> list[str]:
        """The answer with its code; of `full` what the tables leave open too."""
        lines = [
            label + " ".join(printable(text).split()) for label, text in _parts(self.advice) if text.strip()
        ]
        code = "" if self.advice.answer == TOO_LARGE else code_of(self.advice)
        lines += ["code:", *(f"  {line}" for line in code.splitlines())] if code else []
        return lines + list(_open(self.advice)) * self.full

    def tables(self) -> list[printer.Table]:
        """Why, layers, products, recipes, parts of the step, rates, memory, checks."""
        return list(_tables(self.advice)) if self.full else []

    def data(self) -> dict[str, Any]:
        """Plain values; times in milliseconds."""
        return _data(self.advice)


def _parts(a: Advice) -> Iterator[tuple[str, str]]:
    """Each line with its label; empty ones are not printed. Names may hold anything, and can end no line."""
    plan, chosen, model, memory = a.plan, a.chosen, a.model, a.memory
    recipe, loss, has_fp8, is_open = (
        chosen.recipe.name,
        chosen.loss,
        a.rates.has_fp8,
        a.decision == decide.UNDECIDED,
    )
    is_known = not model.whole or (
        has_fp8 and a.rates.figures["fp8"].kind == MEASURED
    )  # of rates, all that can be
    yield "FP8: ", _answer(a, is_known) + f"; {plural(len(a.warnings), 'warning')} below" * bool(a.warnings)
    asked = f"{model.name} on {a.device.key}: {model.tokens:,} tokens a pass, {'compiled' if plan.compiled else 'eager'}"
    sizes = {"dp": plan.dp, "replicas": plan.replicas, "tp": plan.tp}
    asked += "".join(f", {name}={size}" for name, size in sizes.items() if size > 1)
    if plan.pp > 1:
        schedule = "1F1B" if plan.virtual == 1 else "interleaved"
        asked += f", pp={plan.pp} ({schedule}, {plan.accumulation} microbatches)"
    yield "asked: ", asked
    yield "not measured: ", "; ".join(a.not_measured) or "nothing that the gain rests on"
    if has_fp8 and not chosen.unavailable:
        yield "loss: ", _judged(recipe, loss)
    yield "batches: " if model.whole else "note: ", a.made_up
    if is_open:
        rates = f"measure the {a.device.key} by `python -m harness sweep=ceilings` and name it by runs=RUN, or the step by"
        what = "measure the step itself on that GPU by" if is_known else rates
        loop = "`harness.ab` in your own loop on these GPUs"
        yield (
            "to tell: ",
            f"{what} {loop if plan.world > 1 else f'`python -m harness sweep=train model={model.name}`'}",
        )
    if not has_fp8:
        yield "why: ", a.finding("GPU generation")
    else:
        bf16 = a.parts[0]
        share = f"{bf16.linear / bf16.total if bf16.total else 0:.0%} of the bf16 step{'' if model.whole else ' at the most'}"
        yield "why: ", f"{chosen.gains or 'no layer can run it'}; Linear layers take {share}"
        pays = f"from {a.pays_from:,} tokens a pass" if a.pays_from else "at no number of tokens"
        yield _INDENT, f"its products pay {pays}; most products are {model.width:,} wide"
        if plan.dp > 1:
            yield _INDENT, f"communication {a.finding('communication')}"
        elif plan.tp > 1 or model.experts:
            yield _INDENT, a.finding("TP" if plan.tp > 1 else "dense or MoE")
    if a.decision in decide.POSITIVE:
        left, every = [*a.left_out["words"], *a.left_out["names"]], f"{len(model.layers)} Linear layers"
        partly = f"{len(chosen.converted)} of {every}; in bf16: {some(left, 6, ', ')}"
        yield "convert: ", partly if left else f"all {every}"
    if a.with_head:
        yield (
            "head: ",
            f"loss in FP8 not judged; with it {a.with_head.value:.2f}x: sweep=divergence, then head=fp8",
        )
    if memory:
        needs, more = f"{_gib(memory.needed)} of {_gib(memory.device, 0)} GiB", "bf16"
        if memory.fp8:
            more = f"FP8, {(memory.needed - sum(memory.bf16.values())) / GIB:+.1f} against bf16"
        least = f"weights, gradients and AdamW alone take {needs}; activations are not predicted for {memory.unknown}"
        yield "memory: ", f"{memory.word}: {needs} in {more}, by the model" if memory.whole else least
    if memory and a.answer == TOO_LARGE:
        ways = ", or ".join(f"{way} ({_gib(size, 0)} GiB)" for way, size in memory.ways.items())
        ways += "" if memory.whole else " for weights and optimizer alone"
        yield "way out: ", f"{ways}; ask again with it for the code" if memory.ways else _NO_WAY
    if a.four_bits is not None:
        yield "four bits: ", f"no time is predicted: fp8core emulates {' and '.join(a.four_bits.losses)}"
        yield from ((_INDENT, _judged(name, loss)) for name, loss in a.four_bits.losses.items())
        size = model.active or model.parameters, a.train_tokens
        yield from ((_INDENT, line) for each in a.four_bits.public for line in each.lines(*size))
        some_here = "more" if a.four_bits.public else "public"
        yield (
            _INDENT,
            f"{plural(a.four_bits.elsewhere, f'{some_here} comparison')} not timed on a {a.device.key}: reports/published/ledger.md",
        )
    yield from (("warning: ", warning) for warning in a.warnings)


def _judged(recipe: str, loss: Loss | None) -> str:
    """A recipe's verdict with the size that it holds for."""
    if loss is None:
        return f"{recipe} was judged at no size: sweep=divergence"
    return verdict_of(loss) + ("" if loss.counts else "; not near")


def verdict_of(loss: Loss) -> str:
    """A verdict with its gap and the size of its runs."""
    gap = f" {loss.gap}" + (f" ({loss.interval})" if loss.interval else "")
    size = f"{_scaled(loss.parameters)} parameters, {_scaled(loss.tokens)} tokens"
    return f"{loss.recipe} {loss.word}{gap} at {size}"


def _answer(a: Advice, is_known: bool) -> str:
    """The decision; `is_known`: measuring rates would not help."""
    chosen, step, recipe = a.chosen, a.chosen.step, a.chosen.recipe.name
    if a.decision == decide.UNDECIDED:
        at_most = f"at most {step.value:.2f}x a step, a part of which is not known"
        measure = "" if is_known else "; measure: sweep=ceilings, then runs=RUN"
        sentence = f"{a.decision}; {f'{times(step)} contains 1' if a.model.whole else at_most}{measure}"
    elif a.decision in decide.POSITIVE:
        interval = f"{step.value:.2f}x a step, 95 % interval {step.low:.2f} to {step.high:.2f}"
        sentence = f"{a.decision}, recipe {recipe} of {printer.picked(a, 'library')['library']}: {interval}"
        sentence += "; the layers by themselves gain nothing" * chosen.by_gather
    elif chosen.unavailable:
        sentence = f"off: {chosen.unavailable}"
    elif chosen.lossy:
        sentence = f"off: {times(step)} a step, and the loss of {recipe} is worse"
    elif chosen.converted:
        sentence = f"off: at best {times(step)}, not worth {decide.STEP_GAIN - 1:.0%}"
    else:
        sentence = "off: no layer gains"
    if a.memory is None or a.answer != TOO_LARGE:
        return sentence
    needs = f"{_gib(a.memory.needed, 0)} GiB of {_gib(a.memory.device, 0)} by the model"
    return f"the step does not fit: {needs}. If it did: {sentence}"


def findings(a: Advice) -> dict[str, str]:
    """What is found of each of the questions that decide, see `Advice.reasons`."""
    plan, chosen, model, recipe = a.plan, a.chosen, a.model, a.chosen.recipe
    units = f"{a.device.key} has no FP8 matrix units: FP8 would be emulated, and slower"
    if a.rates.has_fp8:
        bf16, fp8 = (a.rates.figures[name] for name in ("bf16", "fp8"))
        sheet = a.device.tflops.get("fp8", 0) / a.device.tflops["bf16"]
        kinds = ", ".join(dict.fromkeys((fp8.kind, bf16.kind)))
        units = f"{a.device.key} multiplies FP8 {fp8.value / bf16.value:.2f} times as fast as bf16 ({kinds}); its data sheet says {sheet:.2f}"
    casts = f"casts of {recipe.mean_bytes:.1f} B/element"
    pays = f"and {casts} FP8 pays from a width of {a.break_even:,.0f}"
    if a.break_even > _NO_WIDTH:
        pays = f"no width pays for {casts}"
    kinds = "only the Linear layers are known: the step is an upper bound"
    if model.whole:
        linear, grouped, attention = (f"{share:.0%}" for share in a.flops)
        experts = f", {grouped} in grouped experts, which stay in bf16" * model.experts
        kinds = f"{'MoE' if model.experts else 'dense'}: {linear} of its FLOPs are in Linear layers{experts}, {attention} in attention"
    split, one = f"tp={plan.tp}", chosen.narrowest
    if plan.tp == 1:
        split = "layers are whole (tp=1)"
    elif one is not None:
        split += f" leaves layers as narrow as {one.layer.fqn}, {one.layer.K} to {one.layer.N}: {one.ratio.value:.2f}x"
    scales = "one scale a tensor, the coarsest" if recipe.one_scale else "scales of rows or blocks"
    loss = (
        f"{recipe.name} has {scales}; whether it trains the same is measured, not predicted: sweep=divergence"
    )
    if a.careful:
        loss = f"it counts (priority=loss): {recipe.name} has {scales}; end in bf16 by schedule=cooldown_bf16:0.1"
    found = {
        "GPU generation": units,
        "dim": f"most products are {model.width:,} wide; with {model.tokens:,} tokens {pays}",
        "dense or MoE": kinds,
        "TP": split,
        "communication": _sends(a),
        "eval loss": loss,
    }
    return {question: " ".join(printable(text).split()) for question, text in found.items()}


def _sends(a: Advice) -> str:
    """What a step waits for of what is sent."""
    plan, chosen, (bf16, fp8) = a.plan, a.chosen, a.parts
    if plan.world == 1:
        return "nothing is sent (one GPU)"
    sentence = f"exposed {_ms(bf16.communication)} of {_ms(bf16.total)} ms in bf16 ({a.exposed:.0%})"
    if chosen.converted:
        sentence += f", {_ms(fp8.communication)} of {_ms(fp8.total)} ms in FP8"
        if chosen.fp8_all_gather:
            sentence += "; FSDP gathers weights in FP8, half the bytes"
        elif plan.dp > 1:
            why = f", as {chosen.recipe.name} casts each along both axes"
            sentence += f"; FSDP gathers weights in bf16{why * (chosen.recipe.gathered_weight is None)}"
        sentence += "; TP inputs too" * chosen.tp_fp8_all_gather
    return sentence


def _open(found: Advice) -> Iterator[str]:
    """What the tables leave open."""
    chosen = found.chosen
    for name, _, one in found.groups:
        if not one.converted:
            yield f"{name} stays in bf16: {one.reason}"
    for option in found.options if found.rates.has_fp8 else ():
        why = option.why_off or option.unavailable
        why = why or ("" if option is chosen else not_by_default(found.library, option.recipe))
        if why:
            yield f"recipe {option.recipe.name}: {why}"
    takes = "stays below 5 % of the step on any number of GPUs"
    if found.gather_from:
        takes = f"takes more than 5 % of the bf16 step from {found.gather_from:,} GPUs on"
    yield f"Gathering weights (FSDP) {takes}."


def _tables(found: Advice) -> Iterator[printer.Table]:
    table, chosen, rates, memory = printer.table, found.chosen, found.rates, found.memory
    yield table(
        "why", ["question", "here", "for"], [(r.question, r.finding, r.speaks_for) for r in found.reasons]
    )
    if rates.has_fp8:
        layers = [
            (
                f"{_short(name)}{f' x{count}' if count > 1 else ''}{'' if one.converted else '*'}",
                f"{one.layer.K}x{one.layer.N}",
                _ms(one.cost.bf16),
                f"{_ms(one.cost.fp8)} + {_ms(one.cost.casts)}",
                times(one.ratio),
            )
            for name, count, one in found.groups
        ]
        what = (
            f"layers, forward and backward, recipe {chosen.recipe.name} (ms); speedup: with a cast of its own, though layers "
            "that read one tensor pay for its cast once; *: stays in bf16"
        )
        yield table(what, ["layer", ">K x N", ">bf16", ">fp8 + casts", ">speedup"], layers)
        yield _products(found)
        recipes = [
            (
                o.recipe.name,
                ", ".join(f"{size:.1f}" for size in o.recipe.cast_bytes.values()),
                str(len(o.converted)),
                times(o.step) if o.converted else "-",
                f"{o.everything.value:.2f}x" if o.layers else "-",
                "<-" if o is chosen else "",
            )
            for o in found.options
        ]
        what = (
            "recipes: bytes of casts for an element of input, weight, gradient; the step's speedup by "
            f"{printer.picked(found, 'library')['library']}; <- the one taken"
        )
        yield table(what, ["recipe", ">casts", ">layers", ">with the filter", ">all", ""], recipes)
    bf16, fp8 = (parts.seconds for parts in found.parts)
    steps = [
        ("step" if part == "total" else part, *(_ms(own[part]) for own in (bf16, fp8)[: 1 + rates.has_fp8]))
        for part in bf16
        if bf16[part] or fp8[part]
    ]
    yield table("where the step goes (ms)", ["part", ">bf16", ">FP8"][: 2 + rates.has_fp8], steps)
    figures = [
        (
            FIGURES[name],
            _scaled(figure.value),
            f"{figure.spread:.0%}",
            f"{figure.kind}: {figure.source}" if figure.kind != MEASURED else figure.source,
        )
        for name, figure in rates.figures.items()
    ]
    yield table("what this rests on", ["figure", ">value", ">+-", "from"], figures)
    if memory:
        in_fp8 = memory.fp8 or {}
        parts = [
            (part, _gib(size, 2), _gib(in_fp8[part], 2) if in_fp8 else "-")
            for part, size in memory.bf16.items()
            if size or in_fp8.get(part)
        ]
        yield table("memory of a GPU, by the model (GiB)", ["part", ">bf16", ">FP8"], parts)
    checks = [
        (
            *(check.what, check.case, check.arm, number(check.predicted), number(check.measured)),
            printer.Cell(f"{check.error:+.0%}", style="" if check.trusted else "bad"),
        )
        for check in found.worst_checks[:_MOST_CHECKS]
    ]
    spreads = [
        f"{count} {what}s: predicted / measured {r.value:.2f}, 95 % within {r.low:.2f} to {r.high:.2f}"
        for count, what, r in found.check_spreads
    ]
    what = "; ".join(["predicted and measured, worst first", *spreads])
    yield table(what, ["what", "case", "arm", ">predicted", ">measured", ">error"], checks)


def _products(found: Advice) -> printer.Table:
    """The products of each layer against the ridge of each dtype."""
    rates, rows = found.rates, []
    ridges = [rates[name] / rates["bandwidth"] for name in ("bf16", "fp8")]
    for name, _, one in found.groups:
        rows.append([_short(name), *[""] * 5])
        for role, (M, K, N) in gemm_sizes(one.layer).items():
            wide, narrow = M * K * N / (M * K + K * N + M * N), 2 * M * K * N / (M * K + K * N + 2 * M * N)
            bound = " ".join("mc"[flops > ridge] for flops, ridge in zip((wide, narrow), ridges, strict=True))
            in_fp8 = f"{narrow:.0f}" if role in found.chosen.recipe.fp8_gemms else "-"
            times_ms = _ms(one.cost.bf16[role]), _ms(one.cost.fp8[role])
            rows.append([f"  {role}", f"{M}x{K}x{N}", f"{wide:.0f}, {in_fp8}", *times_ms, bound])
    what = (
        "products: FLOP/byte against the ridge of each dtype, time (ms); ridge bf16 "
        f"{ridges[0]:.0f}, FP8 {ridges[1]:.0f}; c: bound by computing, m: by memory, bf16 then FP8"
    )
    return printer.table(
        what, ["layer, GEMM", ">M x K x N", ">F/B bf16, fp8", ">bf16", ">fp8", ">bound"], rows
    )


def code_of(found: Advice) -> str:
    """The code that does what was advised; "" where FP8 is off or nobody can tell."""
    if found.decision not in decide.POSITIVE:
        return ""
    plan, gathers = found.plan, printer.picked(found, "library fp8_all_gather tp_fp8_all_gather schedule")
    gathers |= {"compiled": plan.compiled, "sharded": plan.dp > 1, "split": plan.tp > 1}
    gathers["update_scales"] = found.chosen.recipe.scaling != "dynamic"
    gathers["heads"] = HEADS if found.model.example else ()
    return as_code(found.chosen.recipe.name, found.left_out, **gathers)


def _compared(found: Loss | PublicComparison, names: str) -> dict[str, Any]:
    """Attributes by name, and the interval of the gap in percent of the loss; None where there is none."""
    interval = found.interval and printer.picked(found.interval, "low high confidence")
    return {**printer.picked(found, names), "interval": interval}


def _data(found: Advice) -> dict[str, Any]:
    memory, chosen, picked = found.memory, found.chosen, printer.picked
    loss = "recipe model parameters tokens word gap seeds source counts"
    compared = "precision against model parameters tokens target word gap arms samples differs gpu gpus time time_arms source"
    check = "what case arm predicted measured run_id low high error"
    return {
        "model": found.model.name,
        "gpu": found.device.key,
        "tokens": found.model.tokens,
        "decision": found.answer,
        "decision_by_time": chosen.by_time,
        "loss": chosen.loss and _compared(chosen.loss, loss),
        "recipe": chosen.recipe.name,
        **picked(found, "library fp8_all_gather tp_fp8_all_gather schedule"),
        "reasons": [picked(each, "question finding speaks_for") for each in found.reasons],
        "plan": {
            **picked(found.plan, _PLAN),
            "again": picked(found.plan.again, "matmul attention elementwise"),
            "exchanges": [picked(each, "sent layers gathers") for each in found.model.exchanges],
        },
        "not_measured": "; ".join(found.not_measured),
        "four_bits": found.four_bits
        and {
            "public": [_compared(each, compared) for each in found.four_bits.public],
            "elsewhere": found.four_bits.elsewhere,
            "losses": {name: each and _compared(each, loss) for name, each in found.four_bits.losses.items()},
        },
        "memory": memory and picked(memory, "bf16 fp8 device whole ways word") | {"margin": MARGIN},
        "step_speedup": _ratio(chosen.step),
        "step_speedup_with_head": found.with_head and _ratio(found.with_head),
        "step_ms": {
            n: _each_ms(parts.seconds) for n, parts in zip(("bf16", "fp8"), found.parts, strict=True)
        },
        "recipes": [
            {
                "name": option.recipe.name,
                "cast_bytes": option.recipe.cast_bytes,
                "layers": len(option.converted),
                "step_speedup": _ratio(option.step),
                "step_speedup_all_layers": _ratio(option.everything),
                **picked(option, "fp8_all_gather unavailable verdict why_off"),
            }
            for option in found.options
        ],
        "layers": [
            {
                **picked(one.layer, "fqn K N tokens"),
                **picked(one, "converted reason"),
                "speedup": _ratio(one.ratio),
                **{f"{n}_ms": _each_ms(getattr(one.cost, n)) for n in ("bf16", "fp8")},
                "cast_ms": _each_ms(one.cost.casts),
            }
            for one in chosen.layers
        ],
        "filter": {"left_out": found.left_out, "code": code_of(found) or None},
        "pays_from_tokens": found.pays_from,
        "gather_matters_from_gpus": found.gather_from,
        "rates": {name: picked(f, "value spread kind source") for name, f in found.rates.figures.items()},
        "checks": [picked(each, check) for each in found.checks],
        "warnings": [*filter(None, [found.made_up]), *found.warnings],
    }


def _ratio(of: Ratio) -> dict[str, float]:
    return printer.picked(of, "value low high")


def times(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _scaled(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size / 2:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value:.2f}"


def _each_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in seconds.items()}


def _ms(parts: float | Mapping[str, float]) -> str:
    return number(1e3 * (parts if isinstance(parts, float) else sum(parts.values())))


def _gib(size: float, digits: int = 1) -> str:
    return f"{size / GIB:.{digits}f}"


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"
