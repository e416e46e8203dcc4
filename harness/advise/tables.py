"""All tables of an advice, for a terminal of 80 columns: `--full`."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.text import Text

from harness.advise.casts import GEMMS, TENSORS
from harness.advise.fits import GIB
from harness.advise.library_names import not_by_default
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

_MOST_CHECKS = 12
_NAME = 16  # columns


def show_tables(found: Advice, where: Console) -> None:
    """Every table, then what they leave open. Names may hold anything: nothing is read as markup."""
    parts = [_reasons(found), _step(found), _rates(found)]
    if found.rates.has_fp8:
        parts[1:2] = [_layers(found), _gemms(found), _recipes(found), _step(found)]
    for part in (*parts, _memory(found), _checks(found)):
        if part.row_count:
            where.print(part)
    for line in (*_why_not(found), *_thresholds(found)):
        say(where, line)
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


def _reasons(found: Advice) -> Table:
    shown = table("why", "question", "here", "for")
    for reason in found.reasons:
        row(shown, reason.question, reason.finding, reason.speaks_for)
    return shown


def _layers(found: Advice) -> Table:
    shown = table(
        f"layers, forward and backward, recipe {found.chosen.recipe.name} (ms)",
        "|layer",
        ">K x N",
        ">bf16",
        ">fp8 + casts",
        ">speedup",
    )
    for name, count, advice in grouped(found.chosen.layers):
        bf16, fp8, casts = (
            number(1e3 * sum(part.values()))
            for part in (advice.cost.bf16, advice.cost.fp8, advice.cost.casts)
        )
        layer = advice.layer
        many = f" x{count}" if count > 1 else ""
        left = "" if advice.converted else "*"
        cells = (f"{_short(name)}{many}{left}", f"{layer.K}x{layer.N}", bf16, f"{fp8} + {casts}")
        row(shown, *cells, times(advice.ratio))
    shown.caption = Text(
        "speedup: with a cast of its own; layers that read one tensor pay for its cast once. *: stays in bf16"
    )
    return shown


def _why_not(found: Advice) -> list[str]:
    """Why layers stay in bf16, and recipes are not taken, in a line each."""
    lines = [
        f"{name} stays in bf16: {advice.reason.removeprefix('no: ')}"
        for name, _, advice in grouped(found.chosen.layers)
        if not advice.converted
    ]
    for option in found.options if found.rates.has_fp8 else ():
        why = option.why_off or option.unavailable
        if not why and option is not found.chosen:
            why = not_by_default(found.library, option.recipe.name)
        if why:
            lines.append(f"recipe {option.recipe.name}: {why}")
    return lines


def _gemms(found: Advice) -> Table:
    shown = table(
        "products: FLOP/byte against the ridge of each dtype, time (ms)",
        "|layer, GEMM",
        ">M x K x N",
        ">F/B bf16, fp8",
        ">bf16",
        ">fp8",
        ">bound",
    )
    bandwidth = found.rates["bandwidth"]
    for name, _, advice in grouped(found.chosen.layers):
        row(shown, _short(name), *[""] * 5)
        for role in GEMMS:
            M, K, N = gemm_sizes(advice.layer)[role]
            intensity = {b: 2 * M * K * N / (b * (M * K + K * N) + 2 * M * N) for b in (2, 1)}
            in_fp8 = role in found.chosen.recipe.fp8_gemms
            ridge = {2: found.rates["bf16"] / bandwidth, 1: found.rates["fp8"] / bandwidth}
            bound = " ".join("c" if intensity[b] > ridge[b] else "m" for b in (2, 1))
            ratios = f"{intensity[2]:.0f}, {f'{intensity[1]:.0f}' if in_fp8 else '-'}"
            seconds = (number(1e3 * cost[role]) for cost in (advice.cost.bf16, advice.cost.fp8))
            row(shown, f"  {role}", f"{M}x{K}x{N}", ratios, *seconds, bound)
    if shown.row_count:
        ridges = f"ridge bf16 {found.rates['bf16'] / bandwidth:.0f}, FP8 {found.rates['fp8'] / bandwidth:.0f}"
        shown.caption = Text(f"{ridges}; c: bound by computing, m: by memory, bf16 then FP8")
    return shown


def _recipes(found: Advice) -> Table:
    shown = table(
        "recipes: bytes of casts for an element of input, weight, gradient; the step's speedup",
        "|recipe",
        ">casts",
        ">layers",
        ">with the filter",
        ">all",
        "|",
    )
    for option in found.options:
        casts = ", ".join(f"{option.recipe.casts[tensor].total:.1f}" for tensor in TENSORS)
        ratios = (times(option.step), f"{option.everything.value:.2f}x") if option.converted else ("-", "-")
        if option.layers and not option.converted:
            ratios = ("-", f"{option.everything.value:.2f}x")
        row(
            shown,
            option.recipe.name,
            casts,
            str(len(option.converted)),
            *ratios,
            "<-" * (option is found.chosen),
        )
    shown.caption = Text(f"by {found.library}; <- the one taken")
    return shown


def _memory(found: Advice) -> Table:
    shown = table("memory of a GPU, by the model (GiB)", "part", ">bf16", ">FP8")
    memory = found.memory
    if memory is None:
        return shown
    for part in memory.bf16:
        before, after = memory.bf16[part], memory.fp8.get(part, 0) if memory.fp8 else None
        if before or after:
            row(shown, part, f"{before / GIB:.2f}", "-" if after is None else f"{after / GIB:.2f}")
    return shown


def _step(found: Advice) -> Table:
    """Without FP8 units there is one column: nothing runs in FP8."""
    both = found.rates.has_fp8
    shown = table("where the step goes (ms)", "part", ">bf16", *[">FP8"] * both)
    bf16, fp8 = found.parts
    named = [(part.name, getattr(bf16, part.name), getattr(fp8, part.name)) for part in fields(bf16)]
    for name, before, after in (*named, ("step", bf16.total, fp8.total)):
        if before or after:
            row(shown, name, *(number(1e3 * value) for value in (before, after)[: 1 + both]))
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


def _name(members: Sequence[LayerAdvice]) -> str:
    """attention.q for layers.0.attention.q and its like in other blocks."""
    first = members[0].layer.fqn
    if len(members) == 1:
        return first
    # the number of the block, and what stands before it, is the same for all
    parts = first.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers and numbers[-1] + 1 < len(parts) else first


def _short(name: str) -> str:
    """A name as wide as its column; the end of a longer one."""
    return name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"


def times(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _scaled(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G")):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value:.2f}"
