"""An advice as tables for a terminal of 100 columns, and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rich.text import Text

from harness.advise import decide, filters
from harness.advise.casts import GEMMS, TENSORS
from harness.advise.measured import spread
from harness.advise.rates import FIGURES, MEASURED
from harness.advise.step import gemm_sizes
from harness.machine.terminal import row, say, table
from harness.store.text import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from harness.advise.advice import Advice
    from harness.advise.decide import LayerAdvice
    from harness.advise.measured import Check
    from harness.advise.step import Ratio

_COLOURS = {decide.ON: "green", decide.SOME: "yellow", decide.OFF: "red", decide.UNDECIDED: "yellow"}
_MOST_CHECKS = 12


def show(found: Advice, where: Console) -> None:
    """Everything, the decision first. Names may hold anything: nothing is read as markup."""
    _headline(found, where)
    where.print(_reasons(found))
    tables = (_layers(found), _gemms(found), _recipes(found), _step(found), _rates(found), _checks(found))
    for part in tables:
        if part.row_count:
            where.print(part)
    for line in _thresholds(found):
        say(where, line)
    _filter(found, where)
    for warning in found.warnings:
        say(where, f"note: {warning}", "yellow")


def grouped(layers: Iterable[LayerAdvice]) -> list[tuple[str, int, LayerAdvice]]:
    """Layers that are alike in shape, last word, tokens and verdict: (name, how many, one of them)."""
    groups: dict[tuple[object, ...], list[LayerAdvice]] = {}
    for advice in layers:
        layer = advice.layer
        key = (layer.fqn.rsplit(".", 1)[-1], layer.K, layer.N, layer.tokens, advice.converted, advice.reason)
        groups.setdefault(key, []).append(advice)
    return [(_name(members), len(members), members[0]) for members in groups.values()]


def as_dict(found: Advice) -> dict[str, Any]:
    """The same as plain values; times in milliseconds, infinities as null."""
    chosen, on = found.chosen, found.decision in decide.POSITIVE
    return _plain(
        {
            "model": found.model.name,
            "gpu": found.device.key,
            "tokens": found.model.tokens,
            "plan": asdict(found.plan),
            "decision": found.decision,
            "recipe": chosen.recipe.name,
            "fp8_all_gather": found.fp8_all_gather,
            "tp_fp8_all_gather": found.tp_fp8_all_gather,
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
                "code": filters.as_code(
                    chosen.recipe.name, found.left_out, fp8_all_gather=found.fp8_all_gather
                )
                if on
                else None,
                "config": filters.as_config(chosen.recipe.name, found.left_out, found.convertible)
                if on
                else None,
            },
            "pays_from_tokens": found.pays_from,
            "gather_matters_from_gpus": found.gather_from,
            "rates": {name: asdict(figure) for name, figure in found.rates.figures.items()},
            "checks": [asdict(check) | {"error": check.error} for check in found.checks],
            "warnings": list(found.warnings),
        }
    )


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


def _headline(found: Advice, where: Console) -> None:
    step = found.chosen.step
    model, plan = found.model, found.plan
    how = [
        f"{model.tokens:,} tokens",
        "compiled" if plan.compiled else "eager",
        f"dp={plan.dp}",
        f"tp={plan.tp}",
    ]
    if plan.pp > 1:
        schedule = "1F1B" if plan.virtual == 1 else "interleaved"
        how.append(f"pp={plan.pp} ({schedule}, {plan.accumulation} microbatches)")
    say(where, f"{model.name} on {found.device.key}, {', '.join(how)}", "bold")
    if found.decision == decide.UNDECIDED:
        line = f"FP8: can't tell; {_times(step)} contains 1; measure: sweep=ceilings, then runs=RUN"
    elif found.decision == decide.OFF:
        line = "FP8: off"
        if found.chosen.converted and not found.chosen.unavailable:
            line += f" (at best {_times(step)}, not worth {decide.STEP_GAIN - 1:.0%})"
    else:
        some = f" for {len(found.chosen.converted)} of {len(model.layers)} layers"
        scope = "" if found.decision == decide.ON else some
        line = (
            f"FP8: {found.decision}, recipe {found.chosen.recipe.name}{scope}; step predicted {_times(step)}"
        )
    say(where, line, f"bold {_COLOURS[found.decision]}")


def _reasons(found: Advice) -> Table:
    shown = table("why", "question", "here", "for")
    for reason in found.reasons:
        row(shown, reason.question, reason.finding, reason.speaks_for)
    return shown


def _layers(found: Advice) -> Table:
    shown = table(
        f"layers, forward and backward, recipe {found.chosen.recipe.name} (ms)",
        "layer",
        ">n",
        ">K",
        ">N",
        ">bf16",
        ">fp8",
        ">casts",
        ">speedup",
        "FP8, or why not",
    )
    for name, count, advice in grouped(found.chosen.layers):
        bf16, fp8, casts = (
            1e3 * sum(part.values()) for part in (advice.cost.bf16, advice.cost.fp8, advice.cost.casts)
        )
        layer = advice.layer
        cells = (
            name,
            count,
            layer.K,
            layer.N,
            number(bf16),
            number(fp8),
            number(casts),
            _times(advice.ratio),
        )
        row(shown, *map(str, cells), "FP8" if advice.converted else advice.reason)
    shown.caption = Text("speedup: with a cast of its own; layers that read one tensor pay for its cast once")
    return shown


def _gemms(found: Advice) -> Table:
    shown = table(
        "products: FLOP/byte against the ridge of each dtype, time (ms)",
        "layer",
        "GEMM",
        ">M",
        ">K",
        ">N",
        ">F/B bf16",
        ">F/B fp8",
        ">bf16",
        ">fp8",
        ">bound",
    )
    bandwidth = found.rates["bandwidth"]
    for name, _, advice in grouped(found.chosen.layers):
        for role in GEMMS:
            M, K, N = gemm_sizes(advice.layer)[role]
            intensity = {b: 2 * M * K * N / (b * (M * K + K * N) + 2 * M * N) for b in (2, 1)}
            in_fp8 = role in found.chosen.recipe.fp8_gemms
            ridge = {2: found.rates["bf16"] / bandwidth, 1: found.rates["fp8"] / bandwidth}
            bound = " ".join("c" if intensity[b] > ridge[b] else "m" for b in (2, 1))
            bf16, fp8 = 1e3 * advice.cost.bf16[role], 1e3 * advice.cost.fp8[role]
            cells = (
                f"{intensity[2]:.0f}",
                f"{intensity[1]:.0f}" if in_fp8 else "-",
                number(bf16),
                number(fp8),
                bound,
            )
            row(shown, name if role == GEMMS[0] else "", role, str(M), str(K), str(N), *cells)
    if shown.row_count:
        ridges = f"ridge bf16 {found.rates['bf16'] / bandwidth:.0f}, FP8 {found.rates['fp8'] / bandwidth:.0f}"
        shown.caption = Text(f"{ridges}; c: bound by computing, m: by memory, bf16 then FP8")
    return shown


def _recipes(found: Advice) -> Table:
    shown = table(
        "recipes: bytes of casts for an element, the step's speedup",
        "|recipe",
        ">input",
        ">weight",
        ">grad",
        ">layers",
        ">with the filter",
        ">all layers",
        "",
    )
    for option in found.options if found.rates.has_fp8 else ():
        casts = (f"{option.recipe.casts[tensor].total:.1f}" for tensor in TENSORS)
        ratios = (_times(option.step), f"{option.everything.value:.2f}x") if option.converted else ("-", "-")
        if option.layers and not option.converted:
            ratios = ("-", f"{option.everything.value:.2f}x")
        note = option.unavailable or ("chosen" if option is found.chosen else "")
        note = option.why_off or note
        row(shown, option.recipe.name, *casts, str(len(option.converted)), *ratios, note)
    return shown


def _step(found: Advice) -> Table:
    shown = table("where the step goes (ms)", "part", ">bf16", ">FP8")
    bf16, fp8 = found.parts
    for part in fields(bf16):
        before, after = 1e3 * getattr(bf16, part.name), 1e3 * getattr(fp8, part.name)
        if before or after:
            row(shown, part.name, number(before), number(after))
    row(shown, "step", number(1e3 * bf16.total), number(1e3 * fp8.total))
    return shown


def _rates(found: Advice) -> Table:
    shown = table("what this rests on", "figure", ">value", ">+-", "from")
    for name, figure in found.rates.figures.items():
        mark = "" if figure.kind == MEASURED else f"{figure.kind}: "
        row(shown, FIGURES[name], _scaled(figure.value), f"{figure.spread:.0%}", mark + figure.source)
    return shown


def _checks(found: Advice) -> Table:
    shown = table(
        "predicted and measured, worst first",
        "",
        "case",
        "arm",
        ">predicted",
        ">measured",
        ">error",
    )
    worst = sorted(found.checks, key=lambda check: -abs(math.log(check.predicted / check.measured)))
    for check in worst[:_MOST_CHECKS]:
        style = "" if check.trusted else "red"
        cells = (number(check.predicted), number(check.measured), f"{check.error:+.0%}")
        row(shown, check.what, check.case, check.arm, *cells, style=style)
    if worst:
        shown.caption = Text("; ".join(_spreads(found.checks)))
    return shown


def _spreads(checks: Sequence[Check]) -> list[str]:
    lines = []
    for what in ("product", "layer", "step"):
        own = [check for check in checks if check.what == what]
        ratio = spread(own)
        if ratio is not None:
            lines.append(
                f"{len(own)} {what}s: predicted / measured {ratio.value:.2f}, 95 % within {ratio.low:.2f} to {ratio.high:.2f}"
            )
    return lines


def _thresholds(found: Advice) -> list[str]:
    name = found.chosen.recipe.name
    if found.pays_from is None:
        lines = [f"{name} pays at no number of tokens."]
    else:
        lines = [
            f"{name} pays from {found.pays_from:,} tokens in a pass on (asked for: {found.model.tokens:,})."
        ]
    if found.gather_from is None:
        lines.append("Gathering weights (FSDP) stays below 5 % of the step on any number of GPUs.")
    else:
        lines.append(
            f"Gathering weights (FSDP) takes more than 5 % of the bf16 step from {found.gather_from:,} GPUs on."
        )
    return lines


def _filter(found: Advice, where: Console) -> None:
    if found.decision not in decide.POSITIVE:
        return
    name = found.chosen.recipe.name
    say(where, "\nas code", "bold")
    say(where, filters.as_code(name, found.left_out, fp8_all_gather=found.fp8_all_gather))
    config = filters.as_config(name, found.left_out, found.convertible)
    say(where, "\nas keys of a training sweep", "bold")
    say(
        where,
        config or "names of these layers hold characters that a schedule gives a meaning; take the code",
    )


def _name(members: Sequence[LayerAdvice]) -> str:
    """attention.q for layers.0.attention.q and its like in other blocks."""
    first = members[0].layer.fqn
    if len(members) == 1:
        return first
    # the number of the block, and what stands before it, is the same for all
    parts = first.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers and numbers[-1] + 1 < len(parts) else first


def _times(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _scaled(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G")):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value:.2f}"


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
