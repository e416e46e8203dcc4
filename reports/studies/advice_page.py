"""`python reports/studies/advice_page.py FILE.html`: what `advise` answers for common models and GPUs, as a page without a script.

For readers who have no GPU, or have not installed torch. Every answer is that of `harness.advise.command.answer`, for the
command that the cell names; nothing was measured.
"""

from __future__ import annotations

import contextlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

import harness.report
from harness.advise import decide, losses
from harness.advise.command import answer, parse
from harness.advise.memory import GIB, TOO_LARGE
from harness.advise.views import verdict_of
from harness.store.errors import UsageError
from harness.store.text import number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from harness.advise.advice import Advice
    from harness.advise.step import Ratio

# Model, or the folder of a config.json in this repository -> title and the words that it is asked with, as such models are trained.
MODELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpt2": ("GPT-2 124M", ("tokens=32768", "seq=1024")),
    "llama_moe": ("MoE of 8 small experts", ("tokens=32768", "seq=2048")),
    "llama3_1b": ("Llama 3.2 1B", ("tokens=16384", "seq=4096")),
    "llama_7b": ("7B at length 4096, all recomputed", ("tokens=16384", "seq=4096", "checkpointing=full")),
    "llama3_8b": ("Llama 3 8B", ("tokens=8192", "seq=8192", "checkpointing=selective")),
    "docs/examples/Qwen3-8B": ("Qwen3 8B, Linear layers alone", ("tokens=8192", "seq=8192")),
    "llama3_70b": ("Llama 3 70B, all recomputed", ("tokens=8192", "seq=8192", "checkpointing=full")),
    "llama3_405b": ("Llama 3.1 405B, all recomputed", ("tokens=8192", "seq=8192", "checkpointing=full")),
}
ROOT = Path(__file__).parents[2]
GPUS = ("rtx_4090", "l40s", "h100", "h200", "b200", "gb200", "mi300x", "mi355x")
MODES = ("compile", "eager")
SIZES = (1, 8, 64, 512)
WORDS = {  # word of a cell -> what it means
    "on": "FP8 is predicted to gain at least 2 %, with an interval above 1",
    "partial": "the same for some layers; the rest stay in bf16",
    "off": "FP8 is predicted to gain less than 2 %; where no layer gains, the figure is that of all layers in FP8",
    "gather": "the layers by themselves gain nothing: what is gained is that weights are gathered in FP8",
    "can't tell": "the interval of the step contains 1, or only an upper bound is known: measure on that GPU",
    "does not fit": "the step is predicted to take more than the memory of a GPU; of experts, of a config.json and of a pipeline "
    "only weights, gradients and AdamW's averages are counted, so that such a step may not fit where it is not marked",
}


Key = tuple[str, str, str, int]  # model, GPU, mode, GPUs


@dataclass(frozen=True, slots=True)
class Answered:
    """One cell: a word of `WORDS`, the predicted ratio, why FP8 is not on, and the command that gives it."""

    word: str
    ratio: str
    interval: str
    recipe: str
    reason: str
    command: str

    @property
    def style(self) -> str:
        """The word as a name of a class."""
        return self.word.replace("'", "").replace(" ", "-")


def words_of(model: str, gpu: str, mode: str, gpus: int) -> list[str]:
    """Words of the command line; GPUs shard the weights (FSDP)."""
    many = [f"gpus={gpus}"] if gpus > 1 else []
    return [f"model={model}", f"gpu={gpu}", f"mode={mode}", *many, *MODELS[model][1]]


def answered(words: Sequence[str]) -> Answered:
    """The answer to one command line, given in the root of the repository.

    Raises:
        UsageError: it is refused, as where transformers is not installed: that says nothing of FP8, and makes no page.
    """
    command = "python -m harness advise " + " ".join(words)
    with contextlib.chdir(ROOT):
        found = answer(parse(words))
    word, chosen, memory = word_of(found), found.chosen, found.memory
    if word == TOO_LARGE and memory is not None:
        needed, device = memory.needed / GIB, memory.device / GIB
        digits = int(round(needed) == round(device))
        return Answered(word, "", "", "", f"{needed:,.{digits}f} of {device:.{digits}f} GiB", command)
    if chosen.unavailable:
        return Answered(word, "", "", "", chosen.unavailable.split(":")[0], command)
    step, reason = chosen.step, "gains less than 2 %" if word == "off" else ""
    if not chosen.converted:
        step, reason = chosen.everything, "no layer gains"
    low, value, high = _shown(step)
    return Answered(word, f"{value}x", f"{low} to {high}", chosen.recipe.name, reason, command)


def _shown(step: Ratio) -> tuple[str, str, str]:
    """Low, value and high with three digits, or with as many more as tell the value from the ends of a narrow interval."""
    digits = 3
    while digits < 6 and len({number(x, digits) for x in (step.low, step.value, step.high)}) < 3:
        digits += 1
    return number(step.low, digits), number(step.value, digits), number(step.high, digits)


def word_of(found: Advice) -> str:
    """The word of an advice; an interval that contains 1 is never "on"."""
    if found.answer == TOO_LARGE:
        return TOO_LARGE
    step = found.chosen.step
    if found.decision == decide.OFF:
        return "off"
    if found.decision == decide.GATHER:
        return "gather"
    # As it is shown: a reader of "1.00 to 1.09" must not find an "on" above it.
    if float(number(step.low)) <= 1 or found.decision not in (decide.ON, decide.SOME):
        return "can't tell"
    return "on" if found.decision == decide.ON else "partial"


def grid(
    models: Iterable[str], gpus: Iterable[str], modes: Iterable[str] = MODES, sizes: Iterable[int] = SIZES
) -> dict[Key, Answered]:
    """Every cell, in two processes: a model's answers are independent of another's."""
    keys = [(m, g, mode, n) for m in models for g in gpus for mode in modes for n in sizes]
    with ProcessPoolExecutor(2) as pool:
        found = pool.map(answered, [words_of(*key) for key in keys], chunksize=16)
        return dict(zip(keys, found, strict=True))


def page(found: Mapping[Key, Answered], accuracy: Sequence[Sequence[str]]) -> str:
    """The page.

    Args:
        found: what `grid` gives.
        accuracy: rows of the table of docs/advise-accuracy.md, its heading first.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        Path(__file__).with_name("advice_page.html.j2").read_text(encoding="utf-8")
    )
    css = Path(harness.report.__file__).with_name("page.css").read_text(encoding="utf-8")
    models = list(dict.fromkeys(key[0] for key in found))
    counts: dict[str, int] = {word: sum(c.word == word for c in found.values()) for word in WORDS}
    return template.render(
        css=css,
        models=models,
        titles=MODELS,
        gpus=list(dict.fromkeys(key[1] for key in found)),
        modes=list(dict.fromkeys(key[2] for key in found)),
        sizes=list(dict.fromkeys(key[3] for key in found)),
        found=found,
        words=WORDS,
        counts=counts,
        accuracy=accuracy,
        losses=losses_of({cell.recipe for cell in found.values()} - {""}),
        style=lambda word: word.replace("'", "").replace(" ", "-"),
    )


def losses_of(recipes: Collection[str]) -> list[str]:
    """What is known of the loss of some recipes: each verdict with its size; last the recipes without one."""
    found = [each for each in losses.known() if each.recipe in recipes]
    without = sorted({*recipes} - {each.recipe for each in found})
    return [*map(verdict_of, found), *[f"{', '.join(without)} judged at no size"] * bool(without)]


def accuracy_of(document: Path) -> list[list[str]]:
    """Cells of the first table of docs/advise-accuracy.md: predictions beside what others measured."""
    rows: list[list[str]] = []
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            break
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def main(words: Sequence[str]) -> int:
    """Writes the page and its cells as JSON; the accuracy is read from docs/advise-accuracy.md.

    Raises:
        UsageError: not one *.html file.
    """
    if len(words) != 1 or not words[0].endswith(".html"):
        raise UsageError(f"expected one FILE.html to write, got {len(words)} words")
    out = Path(words[0])
    found = grid(MODELS, GPUS)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(as_json(found), encoding="utf-8")
    out.write_text(page(found, accuracy_of(ROOT / "docs" / "advise-accuracy.md")), encoding="utf-8")
    return 0


def as_json(found: Mapping[Key, Answered]) -> str:
    """The cells as plain values, a line each."""
    lines = [json.dumps([list(key), asdict(cell)]) for key, cell in found.items()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def from_json(text: str) -> dict[Key, Answered]:
    """The cells that `as_json` wrote."""
    return {(m, g, mode, int(n)): Answered(**cell) for (m, g, mode, n), cell in json.loads(text)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
