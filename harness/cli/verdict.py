"""`python -m harness verdict base=GLOB candidate=GLOB`: does the candidate train as the base does, by anyone's loss curves?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.gate.options import Exit
from harness.machine import terminal
from harness.store import printer
from harness.store.curve_files import READERS, read_all
from harness.store.curve_logs import FORMATS
from harness.store.errors import UsageError
from harness.store.text import printable
from harness.store.words import key, options_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EXITS = {"PASS": Exit.OK, "FAIL": Exit.NUMERICS, "INCONCLUSIVE": Exit.INCONCLUSIVE}


@dataclass(frozen=True, slots=True)
class VerdictOptions:
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
    window: int = key("so many last values of a run count; 0: chosen from the data (0)", 0, span=(0, 1e9))
    target: float | None = key("time until this loss is reached, in place of the end", None)
    noise: list[str] = key("files of similar runs, to say how many are needed where no side has two", [])
    cluster: str = key(
        "column of what runs of a side share: a machine, a submission (machine, host, ...)", ""
    )
    between: str = key("sd between such clusters, of the loss, where each side has one (0%)", "0%")
    treatment: list[str] = key("columns that name what is compared (those that speak of a format)", [])
    differs: list[str] = key("columns, and codes of findings, that are known to differ", [])
    format: str = key(
        f"of the files ({', '.join([*READERS, *FORMATS])}), or a regular expression with (?P<step>), (?P<value>)",
        "",
    )
    json: bool = key("as plain values", False)
    output: Path | None = key("HTML page to write", short="-o")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: a side without files, a file that cannot be read, an option that is none.
    """
    if (options := options_of(VerdictOptions, words)) is None:
        return 0
    from harness.judge.verdict.rule import verdict

    if not (options.base and options.candidate):
        raise UsageError("verdict needs base=GLOB and candidate=GLOB")
    asked: dict[str, Any] = {
        side: read_all(getattr(options, side), side, options.format)
        for side in ("base", "candidate", "noise")
    }
    asked |= {
        name: getattr(options, name)
        for name in ("value", "step", "paired", "window", "target", "cluster", "treatment", "differs")
    }
    found = verdict(
        **asked, margin=_share(options.margin, "margin"), between=_share(options.between, "between")
    )
    where = terminal.console()
    printer.show(found, where, as_program=options.json)
    if options.output:
        from harness.report.pages import curve_verdict

        try:
            options.output.write_text(curve_verdict(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {options.output} ({error.strerror}); choose another place with -o FILE.html"
            ) from error
        terminal.print_text(where, f"page     {options.output}")
    return EXITS[found.outcome]


def _share(percentage: str, name: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+%", percentage):
        raise UsageError(
            f"{name}={printable(percentage)}: expected a percentage of the base's loss, as in {name}=0.25%"
        )
    return float(percentage[:-1]) / 100
