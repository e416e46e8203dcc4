"""Views of an advice: words for a terminal, tables, code, plain values. Their text is in the templates beside this file."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from rich.text import Text

from harness.advise import decide
from harness.advise.casts import not_by_default
from harness.advise.layer import gemm_sizes
from harness.advise.plan import GIB, MARGIN, TOO_LARGE
from harness.advise.rates import FIGURES
from harness.machine.terminal import printable, say, table
from harness.store.text import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from harness.advise.advice import Advice
    from harness.advise.step import Ratio

WIDTH = 80
_CODE_WIDTH = 78
_NAME = 16  # columns
# The output head in torchtitan, transformers and nanoGPT, Megatron, GPT-NeoX, and here
HEADS = ("head", "lm_head", "output", "output_layer", "embed_out")
_COLOURS = {decide.ON: "green", decide.OFF: "red", TOO_LARGE: "red"}


def show(found: Advice, where: Console, full: bool = False) -> None:
    """The answer; with `full` the tables behind it. Names may hold anything: nothing is read as markup."""
    first, *rest = lines(found)
    say(where, first, "bold")
    head = next((i for i, line in enumerate(rest) if i and not line.startswith("     ")), len(rest))
    say(where, "\n".join(rest[:head]), f"bold {_COLOURS.get(found.answer, 'yellow')}")
    for line in rest[head:]:
        where.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    if full:
        _show_tables(found, where)


def lines(found: Advice) -> list[str]:
    """The lines of the answer, wrapped at `WIDTH` between words; a longer word, such as a name, keeps its line."""
    told: list[str] = []
    for part in _filled("advice.txt.j2", a=found).split("\n\n"):
        label, _, text = part.lstrip("\n").partition("\t")
        if text.strip():
            told += textwrap.wrap(
                label + " ".join(text.split()),
                WIDTH,
                subsequent_indent=" " * min(len(label), 9),
                break_long_words=False,
                break_on_hyphens=False,
            )
    code = "" if found.answer == TOO_LARGE else code_of(found)
    return [*told, *(["code:", *(f"  {line}" for line in code.splitlines())] if code else [])]


def sentence(question: str, found: Advice) -> str:
    """What is found of one of the questions that decide, see `Advice.reasons`."""
    return " ".join(_filled("reasons.txt.j2", question=question, a=found).split())


def code_of(found: Advice) -> str:
    """The code that does what was advised; "" where FP8 is off or nobody can tell."""
    if found.decision not in decide.POSITIVE:
        return ""
    plan, gathers = found.plan, _picked(found, "library fp8_all_gather tp_fp8_all_gather schedule")
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


def as_dict(found: Advice) -> dict[str, Any]:
    """The same as plain values; times in milliseconds, infinities as null."""
    memory, chosen = found.memory, found.chosen
    about = "library fp8_all_gather tp_fp8_all_gather schedule reasons plan"
    return _plain(
        {
            "model": found.model.name,
            "gpu": found.device.key,
            "tokens": found.model.tokens,
            "decision": found.answer,
            "decision_by_time": chosen.by_time,
            "loss": chosen.loss,
            "recipe": chosen.recipe.name,
            **_picked(found, about),
            "not_measured": "; ".join(found.not_measured),
            "memory": memory and _picked(memory, "bf16 fp8 device whole ways word") | {"margin": MARGIN},
            "step_speedup": chosen.step,
            "step_speedup_with_head": found.with_head,
            "step_ms": {n: _ms(parts.seconds) for n, parts in zip(("bf16", "fp8"), found.parts, strict=True)},
            "recipes": [
                {
                    "name": option.recipe.name,
                    "cast_bytes": option.recipe.cast_bytes,
                    "layers": len(option.converted),
                    "step_speedup": option.step,
                    "step_speedup_all_layers": option.everything,
                    **_picked(option, "fp8_all_gather unavailable verdict why_off"),
                }
                for option in found.options
            ],
            "layers": [
                {
                    **_picked(one.layer, "fqn K N tokens"),
                    **_picked(one, "converted reason"),
                    "speedup": one.ratio,
                    **{f"{n}_ms": _ms(getattr(one.cost, n)) for n in ("bf16", "fp8")},
                    "cast_ms": _ms(one.cost.casts),
                }
                for one in chosen.layers
            ],
            "filter": {"left_out": found.left_out, "code": code_of(found) or None},
            "pays_from_tokens": found.pays_from,
            "gather_matters_from_gpus": found.gather_from,
            "rates": found.rates.figures,
            "checks": [asdict(check) | {"error": check.error} for check in found.checks],
            "warnings": [*filter(None, [found.made_up]), *found.warnings],
        }
    )


def _picked(of: object, names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names.split()}


def _show_tables(found: Advice, where: Console) -> None:
    """Every table, then what they leave open: lines of the template by their first cell."""
    shown: Table | None = None
    text = _filled("tables.txt.j2", a=found)
    for line in [*filter(None, text.splitlines()), "end"]:
        kind, *cells = line.split("\t")
        if shown is not None and kind in ("row", "red"):
            shown.add_row(*(Text(cell) for cell in cells), style="red" * (kind == "red"))
        elif shown is not None and kind == "caption":
            shown.caption = Text(cells[0])
        else:
            if shown is not None and shown.row_count:
                where.print(shown)
            shown = table(*cells) if kind == "table" else None
            if kind in ("say", "note"):
                say(where, cells[0], "yellow" * (kind == "note"))


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
        "number": number,
        "ms": lambda parts: number(1e3 * (parts if isinstance(parts, float) else sum(parts.values()))),
        "gib": lambda size, digits=1: f"{size / GIB:.{digits}f}",
        "percent": "{:.0%}".format,
        "times": times,
        "f": lambda value, spec: format(value, spec),
        "repr": repr,
        "names": _names,
        "fit": _fit,
        "short": lambda name: name if len(name) <= _NAME else f"...{name[3 - _NAME :]}",
        "scaled": _scaled,
    }
    made.globals |= {
        "decide": decide,
        "FIGURES": FIGURES,
        "gemm_sizes": gemm_sizes,
        "not_by_default": not_by_default,
    }
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


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in seconds.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
