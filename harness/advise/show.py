"""An advice in about 20 lines of at most 80 columns, and as JSON. `harness.advise.tables` has everything."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from harness.advise import decide
from harness.advise.advice import way_out
from harness.advise.casts import TENSORS
from harness.advise.fits import GIB, MARGIN, TOO_LARGE
from harness.advise.library_names import FP8CORE, provenance
from harness.advise.printed_code import Setup, as_code, is_executed
from harness.advise.rates import MEASURED
from harness.advise.tables import show_tables, times
from harness.machine.terminal import printable, say

if TYPE_CHECKING:
    from rich.console import Console

    from harness.advise.advice import Advice
    from harness.advise.decide import LayerAdvice
    from harness.advise.step import Ratio

WIDTH = 80
_COLOURS = {
    decide.ON: "green",
    decide.SOME: "yellow",
    decide.OFF: "red",
    decide.UNDECIDED: "yellow",
    TOO_LARGE: "red",
}


def show(found: Advice, where: Console, full: bool = False) -> None:
    """The answer; with `full` the tables behind it. Names may hold anything: nothing is read as markup."""
    first, *rest = lines(found)
    say(where, first, "bold")
    headline, rest = rest[: _head(rest)], rest[_head(rest) :]
    say(where, "\n".join(headline), f"bold {_COLOURS[found.answer]}")
    for line in rest:
        where.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    if full:
        show_tables(found, where)


def lines(found: Advice) -> list[str]:
    """The lines of the answer, wrapped at `WIDTH` between words; a longer word, such as a name, keeps its line."""
    told = _wrapped("", _asked(found))
    told += _wrapped("FP8: ", _decision(found))
    told += _wrapped("not measured: ", _unmeasured(found))
    if found.made_up:
        told += _wrapped("batches: ", found.made_up)
    if found.decision == decide.UNDECIDED:
        told += _wrapped("to tell: ", way_out(found.model, found.device, found.rates, found.plan))
    for i, reason in enumerate(_why(found)):
        told += _wrapped("why: " if not i else "     ", reason)
    if found.decision in decide.POSITIVE:
        told += _wrapped("convert: ", _layers(found))
    if found.memory is not None:
        told += _wrapped("memory: ", found.memory.said)
    code = _code(found)
    if found.answer == TOO_LARGE:
        told += _wrapped("way out: ", _ways(found))
    elif code:
        told += ["code:", *(f"  {line}" for line in code.splitlines())]
    return told


def as_dict(found: Advice) -> dict[str, Any]:
    """The same as plain values; times in milliseconds, infinities as null."""
    chosen = found.chosen
    return _plain(
        {
            "model": found.model.name,
            "gpu": found.device.key,
            "tokens": found.model.tokens,
            "plan": asdict(found.plan),
            "decision": found.answer,
            "decision_by_time": found.decision,
            "library": found.library,
            "recipe": chosen.recipe.name,
            "fp8_all_gather": found.fp8_all_gather,
            "tp_fp8_all_gather": found.tp_fp8_all_gather,
            "schedule": found.schedule,
            "not_measured": _unmeasured(found),
            "memory": _memory_dict(found),
            "step_speedup": _ratio(chosen.step),
            "step_ms": {
                name: {f.name: 1e3 * getattr(parts, f.name) for f in fields(parts)}
                | {"total": 1e3 * parts.total}
                for name, parts in zip(("bf16", "fp8"), found.parts, strict=True)
            },
            "reasons": [asdict(reason) for reason in found.reasons],
            "recipes": [
                {
                    "name": option.recipe.name,
                    "cast_bytes": {t: option.recipe.casts[t].total for t in TENSORS},
                    "layers": len(option.converted),
                    "step_speedup": _ratio(option.step),
                    "step_speedup_all_layers": _ratio(option.everything),
                    "fp8_all_gather": option.fp8_all_gather,
                    "unavailable": option.unavailable,
                    "verdict": option.verdict,
                    "why_off": option.why_off,
                }
                for option in found.options
            ],
            "layers": [_layer_dict(advice) for advice in chosen.layers],
            "filter": {
                "left_out": dict(found.left_out),
                "code": _code(found) or None,
            },
            "pays_from_tokens": found.pays_from,
            "gather_matters_from_gpus": found.gather_from,
            "rates": {name: asdict(figure) for name, figure in found.rates.figures.items()},
            "checks": [asdict(check) | {"error": check.error} for check in found.checks],
            "warnings": [*filter(None, [found.made_up]), *found.warnings],
        }
    )


def _asked(found: Advice) -> str:
    model, plan = found.model, found.plan
    mode = "compiled" if plan.compiled else "eager"
    told = f"{model.name} on {found.device.key}: {model.tokens:,} tokens a pass, {mode}"
    for key in ("dp", "replicas", "tp"):
        if getattr(plan, key) > 1:
            told += f", {key}={getattr(plan, key)}"
    if plan.pp > 1:
        schedule = "1F1B" if plan.virtual == 1 else "interleaved"
        told += f", pp={plan.pp} ({schedule}, {plan.accumulation} microbatches)"
    return told


def _decision(found: Advice) -> str:
    step, chosen = found.chosen.step, found.chosen
    gain = f"{step.value:.2f}x a step, 95 % interval {step.low:.2f} to {step.high:.2f}"
    if found.decision == decide.UNDECIDED:
        word = f"{found.decision}; {times(step)} contains 1"
        if found.rates.figures["fp8"].kind != MEASURED:
            word += "; measure: sweep=ceilings, then runs=RUN"
    elif found.decision == decide.OFF:
        word = "off"
        if chosen.unavailable:
            word += f": {chosen.unavailable}"
        elif chosen.converted:
            word += f": at best {times(step)}, not worth {decide.STEP_GAIN - 1:.0%}"
        else:
            word += ": no layer gains"
    else:
        word = f"{found.decision}, recipe {chosen.recipe.name} of {found.library}: {gain}"
    if found.answer != TOO_LARGE:
        return word
    assert found.memory is not None
    size = f"{found.memory.needed / GIB:.0f} GiB of {found.memory.device / GIB:.0f}"
    return f"the step does not fit: {size} by the model. If it did: {word}"


def _unmeasured(found: Advice) -> str:
    parts = [] if not found.rates.has_fp8 else [provenance(found.library)]
    coded = found.answer in decide.POSITIVE
    if coded and not is_executed(found.library):
        parts.append("the code below (not run here: its library is absent)")
    elif coded:
        parts.append("the code on a GPU (tests run it on a CPU)")
    guessed = [
        f"{name} rate ({found.rates.figures[name].kind})"
        for name in ("bf16", "fp8")
        if name in found.rates.figures and found.rates.figures[name].kind != MEASURED
    ]
    if guessed:
        parts.append(", ".join(guessed))
    if not found.model.whole:
        parts.append("attention and all else but the Linear layers are left out")
    return "; ".join(parts) or "nothing that the gain rests on"


def _why(found: Advice) -> list[str]:
    """At most three lines."""
    if not found.rates.has_fp8:
        return [found.reasons[0].finding]
    able = [one for one in found.chosen.layers if not decide.barred(one.layer, found.chosen.recipe)]
    bf16, fp8, casts = (
        sum(sum(getattr(one.cost, part).values()) for one in able) for part in ("bf16", "fp8", "casts")
    )
    share = found.parts[0].linear / found.parts[0].total if found.parts[0].total else 0.0
    gains = (
        f"products {bf16 / fp8:.2f}x, with casts {bf16 / (fp8 + casts):.2f}x"
        if able
        else "no layer can run it"
    )
    whole = "" if found.model.whole else " at the most"
    told = [f"{gains}; Linear layers take {share:.0%} of the bf16 step{whole}"]
    pays = "at no number of tokens" if found.pays_from is None else f"from {found.pays_from:,} tokens a pass"
    told.append(f"{found.chosen.recipe.name} pays {pays}; most products are {found.model.width} wide")
    return [*told, _third(found)]


def _third(found: Advice) -> str:
    """What else decides: what is sent, the split of layers, experts, or the loss."""
    by_question = {reason.question: reason for reason in found.reasons}
    if found.plan.dp > 1 and not found.schedule:
        return f"communication {by_question['communication'].finding}"
    if found.plan.tp > 1 and not found.schedule:
        return by_question["TP"].finding
    if found.model.experts and not found.schedule:
        return by_question["dense or MoE"].finding
    name = found.chosen.recipe.name
    if found.schedule:
        return f"loss: {name} has fine scales, and the run ends in bf16 ({found.schedule})"
    coarse = "one scale a tensor" if name in ("tensorwise", "delayed") else "fine scales"
    return f"loss: {coarse}; sweep=divergence measures whether it trains alike"


def _layers(found: Advice) -> str:
    total, taken = len(found.model.layers), len(found.chosen.converted)
    if taken == total:
        return f"all {total} Linear layers"
    names = [*found.left_out["words"], *found.left_out["names"]]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{taken} of {total} Linear layers; in bf16 stay {shown}"


def _ways(found: Advice) -> str:
    assert found.memory is not None
    ways = [f"{way} ({size / GIB:.0f} GiB)" for way, size in found.memory.ways.items()]
    if not ways:
        rest = "more tensor parallelism, or a pipeline (pp=), of which no memory is predicted"
        return f"none found by the model; a smaller model, {rest}"
    bound = "" if found.memory.whole else " for weights and optimizer alone"
    return f"{', or '.join(ways)}{bound}; ask again with it for the code"


def _code(found: Advice) -> str:
    """The code, "" where FP8 is off or nobody can tell."""
    if found.decision not in decide.POSITIVE:
        return ""
    plan = found.plan
    setup = Setup(
        found.library,
        plan.compiled,
        sharded=plan.dp > 1,
        fp8_all_gather=found.fp8_all_gather,
        split=plan.tp > 1,
        tp_fp8_all_gather=found.tp_fp8_all_gather,
        schedule=found.schedule if found.library == FP8CORE else "",
    )
    return as_code(found.chosen.recipe.name, found.left_out, setup)


def _memory_dict(found: Advice) -> dict[str, Any] | None:
    memory = found.memory
    if memory is None:
        return None
    parts = {"bf16": dict(memory.bf16), "fp8": None if memory.fp8 is None else dict(memory.fp8)}
    rest = {"device": memory.device, "whole": memory.whole, "word": memory.word, "margin": MARGIN}
    return {**parts, **rest, "ways": dict(memory.ways)}


def _layer_dict(advice: LayerAdvice) -> dict[str, Any]:
    layer, cost = advice.layer, advice.cost
    return {
        "fqn": layer.fqn,
        "K": layer.K,
        "N": layer.N,
        "tokens": layer.tokens,
        "converted": advice.converted,
        "reason": advice.reason,
        "speedup": _ratio(advice.ratio),
        "bf16_ms": {role: 1e3 * s for role, s in cost.bf16.items()},
        "fp8_ms": {role: 1e3 * s for role, s in cost.fp8.items()},
        "cast_ms": {tensor: 1e3 * s for tensor, s in cost.casts.items()},
    }


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        label + text,
        WIDTH,
        subsequent_indent=" " * min(len(label), 9),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(rest: list[str]) -> int:
    """How many of the lines are the decision's."""
    return next((i for i, line in enumerate(rest) if i and not line.startswith("     ")), len(rest))


def _ratio(ratio: Ratio) -> dict[str, float]:
    return {"value": ratio.value, "low": ratio.low, "high": ratio.high}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
