"""`python -m harness verdict base=GLOB candidate=GLOB`: does the candidate train as the base does, by anyone's loss curves?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.gate.options import Exit
from harness.machine import terminal
from harness.store.errors import UsageError
from harness.store.text import printable
from harness.store.words import key, options_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EXITS = {"PASS": Exit.OK, "FAIL": Exit.NUMERICS, "INCONCLUSIVE": Exit.INCONCLUSIVE}
STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold"}


@dataclass(frozen=True, slots=True)
class Words:
    """python -m harness verdict: loss curves of anyone's runs, judged: CSV, W&B's and Lightning's among them, JSONL, Parquet, trainer_state.json, TensorBoard, text logs
    exit 0 PASS; 4 FAIL; 6 INCONCLUSIVE; 2 the request could not be carried out
    """

    base: list[str] = key(
        "files of the base, as in 'bf16/*.csv', or of some of their runs: 'runs.csv:bf16*'", []
    )
    candidate: list[str] = key("files of the candidate", [])
    value: str = key("column of the loss (val_loss, eval_loss, ...)", "")
    step: str = key("column of the steps (step, _step, ...)", "")
    paired: str = key("seed: runs of one seed share weights and batches", "no", choices=("no", "seed"))
    margin: str = key("of equivalence, of the base's loss (0.25%)", "0.25%")
    window: int = key("compare the mean of the last so many values (1)", 1, span=(1, 1e9))
    target: float | None = key("time until this loss is reached, in place of the end", None)
    noise: list[str] = key("files of similar runs, to say how many are needed where no side has two", [])
    loss: str = key("column of the training loss, where paired (train_loss)", "train_loss")
    format: str = key(
        "of text logs: modded_nanogpt, nanogpt, or a regular expression with (?P<step>), (?P<value>)", ""
    )
    output: Path | None = key("HTML page to write", short="-o")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: a side without files, a file that cannot be read, an option that is none.
    """
    if (options := options_of(Words, words)) is None:
        return 0
    from harness.judge.curve_verdict import verdict
    from harness.store.curve_files import read_all

    if not re.fullmatch(r"\d*\.?\d+%", options.margin):
        raise UsageError(
            f"margin={printable(options.margin)}: expected a percentage of the base's loss, as in margin=0.25%"
        )
    if not (options.base and options.candidate):
        raise UsageError("verdict needs base=GLOB and candidate=GLOB")
    asked: dict[str, Any] = {
        side: read_all(getattr(options, side), side, options.format)
        for side in ("base", "candidate", "noise")
    }
    asked |= {
        name: getattr(options, name) for name in ("value", "step", "paired", "window", "target", "loss")
    }
    found = verdict(**asked, margin=float(options.margin[:-1]) / 100)
    where = terminal.console()
    for line in found.lines:
        terminal.say(where, line, STYLES[found.outcome] if line.startswith(found.outcome) else "")
    if options.output:
        from harness.report.curves_page import page

        try:
            options.output.write_text(page(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {options.output} ({error.strerror}); choose another place with -o FILE.html"
            ) from error
        terminal.say(where, f"page     {options.output}")
    return EXITS[found.outcome]
