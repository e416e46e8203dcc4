"""Views of an advice: words for a terminal, tables, code, plain values. Their text is in the templates beside this file."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from harness.advise import decide
from harness.advise.casts import not_by_default
from harness.advise.layer import gemm_sizes
from harness.advise.plan import GIB, MARGIN, TOO_LARGE
from harness.advise.rates import FIGURES, MEASURED
from harness.store import printer
from harness.store.text import number, plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.advise.advice import Advice
    from harness.advise.step import Ratio

_CODE_WIDTH = 78
_NAME = 16  # characters of a layer
_MOST_CHECKS = 12
# The output head in torchtitan, transformers and nanoGPT, Megatron, GPT-NeoX, and here
HEADS = ("head", "lm_head", "output", "output_layer", "embed_out")
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
        told = []
        for part in _filled("advice.txt.j2", a=self.advice).split("\n\n"):
            label, _, text = part.lstrip("\n").partition("\t")
            if text.strip():
                told.append(label + " ".join(text.split()))
        code = "" if self.advice.answer == TOO_LARGE else code_of(self.advice)
        told += ["code:", *(f"  {line}" for line in code.splitlines())] if code else []
        return told + list(_open(self.advice)) * self.full

    def tables(self) -> list[printer.Table]:
        """Why, layers, products, recipes, parts of the step, rates, memory, checks."""
        return list(_tables(self.advice)) if self.full else []

    def data(self) -> dict[str, Any]:
        """Plain values; times in milliseconds."""
        return _data(self.advice)


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
            f"{found.library}; <- the one taken"
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


def sentence(question: str, found: Advice) -> str:
    """What is found of one of the questions that decide, see `Advice.reasons`."""
    return " ".join(_filled("reasons.txt.j2", question=question, a=found).split())


def code_of(found: Advice) -> str:
    """The code that does what was advised; "" where FP8 is off or nobody can tell."""
    if found.decision not in decide.POSITIVE:
        return ""
    plan, gathers = found.plan, printer.picked(found, "library fp8_all_gather tp_fp8_all_gather schedule")
    gathers |= {"compiled": plan.compiled, "sharded": plan.dp > 1, "split": plan.tp > 1}
    gathers["update_scales"] = found.chosen.recipe.scaling != "dynamic"
    gathers["heads"] = HEADS if found.model.example else ()
    return as_code(found.chosen.recipe.name, found.left_out, **gathers)


def as_code(recipe: str, left_out: Mapping[str, Sequence[str]], **setup: Any) -> str:
    """Python for a model `model`, and where a step needs calls of its own a `train_step`; all names are quoted.

    Tests run the code of every recipe of fp8core, and let `fp8core.verify` judge the step.

    Args:
        recipe: its name.
        left_out: what stays in bf16: last words of names under "words", whole ones under "names".
        setup: what else it must do: library (default fp8core), compiled, sharded (FSDP), fp8_all_gather (of its weights),
            split (tensor parallelism), tp_fp8_all_gather (of its inputs), schedule (of precisions), update_scales (in
            each step), heads (what an output head may be called, if the names are not those of the reader's model).

    >>> print(as_code("delayed", {"words": ["k"], "names": []}, compiled=True, update_scales=True))
    import fp8core
    LEFT_OUT = {'k'}  # last words of names
    assert LEFT_OUT <= {n.rsplit(".", 1)[-1] for n, _ in model.named_modules()}
    takes = lambda module, fqn: fqn.rsplit(".", 1)[-1] not in LEFT_OUT
    fp8core.convert_to_float8_training(
        model, config='delayed', module_filter_fn=takes)
    model.compile()
    def train_step(step, batch):
        model(*batch).backward()
        optimizer.step()
        fp8core.update_scales(model)
        optimizer.zero_grad()
    """
    known = ["compiled", "sharded", "fp8_all_gather", "split", "tp_fp8_all_gather"]
    known += ["schedule", "update_scales", "heads"]
    asked = {"library": "fp8core", **dict.fromkeys(known), **setup}
    template = _templates().overlay(finalize=None).get_template("code.py.j2")
    heads = asked["heads"] or ()
    words = [word for word in left_out["words"] if word not in heads]
    asked["heads"] = heads if len(words) < len(left_out["words"]) else ()
    code = template.render(recipe=recipe, s=asked, words=words, names=left_out["names"])
    return "\n".join(line for line in code.splitlines() if line.strip())


def _data(found: Advice) -> dict[str, Any]:
    memory, chosen, picked = found.memory, found.chosen, printer.picked
    loss = "recipe model parameters tokens word gap seeds source counts"
    check = "what case arm predicted measured run_id low high error"
    return {
        "model": found.model.name,
        "gpu": found.device.key,
        "tokens": found.model.tokens,
        "decision": found.answer,
        "decision_by_time": chosen.by_time,
        "loss": chosen.loss and picked(chosen.loss, loss),
        "recipe": chosen.recipe.name,
        **picked(found, "library fp8_all_gather tp_fp8_all_gather schedule"),
        "reasons": [picked(each, "question finding speaks_for") for each in found.reasons],
        "plan": asdict(found.plan),
        "not_measured": "; ".join(found.not_measured),
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


def _filled(template: str, **facts: Any) -> str:
    return _templates().get_template(template).render(**facts)


@functools.cache
def _templates() -> jinja2.Environment:
    """What is filled in can neither end a line nor a cell: names may hold anything."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )
    made.filters |= {
        "ms": _ms,
        "gib": _gib,
        "percent": "{:.0%}".format,
        "times": times,
        "f": lambda value, spec: format(value, spec),
        "repr": repr,
        "names": _names,
        "fit": _fit,
        "plural": plural,
        "scaled": _scaled,
    }
    made.globals |= {"decide": decide, "TOO_LARGE": TOO_LARGE}
    return made


def _names(values: Sequence[str], start: str, comment: str = "") -> str:
    """A set of quoted names, on as many lines as it takes."""
    whole = f"{start} = {{{', '.join(map(repr, values))}}}{comment}"
    if len(whole) <= _CODE_WIDTH:
        return whole
    lines = [f"{start} = {{{comment}"]
    for value in map(repr, values):
        if len(lines) > 1 and len(lines[-1]) + len(value) + 2 <= _CODE_WIDTH:
            lines[-1] += f" {value},"
        else:
            lines.append(f"    {value},")
    return "\n".join([*lines, "}"])


def _fit(inner: str, head: str, bare: bool = False) -> str:
    """A call in one line, or in two where it is too long; `bare`: without parentheses in one line."""
    whole = head + (inner if bare else f"({inner})")
    return whole if len(whole) <= _CODE_WIDTH else f"{head}(\n    {inner})"


def _scaled(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
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
