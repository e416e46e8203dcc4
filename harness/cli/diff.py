"""`python -m harness diff RUN RUN [-o FILE.html]`: what changed between two runs, on the terminal or as a page with both drawn together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import store
from harness.judge.diff import changes
from harness.machine.terminal import console
from harness.store import printer
from harness.store.errors import UsageError
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """python -m harness diff: what changed between two runs: the set-up, what ran, times and where they went
    exit 0 compared; 2 the request could not be carried out
    """

    runs: list[str] = word("RUN RUN", "folders results/<sweep>/<run_id>, or their ids")
    json: bool = key("as plain values", False)
    output: Path | None = key("FILE.html: both runs in one page, curves over each other", short="-o")
    results_dir: str = key("where run ids are looked up", "results")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: not two runs, several in one of the two folders, an unknown word, a run without a row, or a page that can't be
            written.
    """
    if (options := options_of(DiffOptions, words)) is None:
        return 0
    runs = options.runs
    if len(runs) != 2:
        raise UsageError(
            f"diff takes two runs, got {len(runs)}: folders results/<sweep>/<run_id>, or their ids"
        )
    frames = []
    for run in runs:
        frame = store.open_run(store.find_run(run, options.results_dir))
        if frame.attrs["problems"]:
            raise UsageError(f"cannot read {frame.attrs['problems'][0]}; measure it again")
        if not len(frame):
            raise UsageError(f"{run} holds no row")
        if (held := frame["run_id"].nunique()) > 1:
            raise UsageError(f"{run} holds {held} runs: name one of them")
        frames.append(frame)
    found = changes(frames[0], frames[1], [Path(run).name for run in runs])
    printer.show(found, console(), as_program=options.json)
    if options.output is not None:
        from harness.report.pages import two_runs

        try:
            options.output.write_text(two_runs(found, frames), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
        console().print(f"page     {options.output}", markup=False, soft_wrap=True)
    return 0
