"""Report: stored runs as one HTML file that opens from disk, and a markdown twin. Imports no torch."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.machine import raw_output
from harness.store import find_run
from harness.store.errors import UsageError
from harness.store.run_files import written
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where a report was written, and what in its data could not be read."""

    html: Path
    markdown: Path
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """python -m harness report: HTML report and markdown twin from stored runs"""

    runs: list[str] = word("RUN", "run folder, folder of runs, Parquet file, or run id")
    output: Path | None = key("HTML file to write (reports/<run_id>.html)", short="-o")
    results_dir: str = key("where run ids are looked up", "results")
    static: bool = key("no JavaScript: smaller, tables do not sort", False)
    mfu: bool = key("MFU first, or why there is none", False)
    figures: bool = key("also write the figures as SVG; the markdown twin then shows them", False)


def main(argv: Sequence[str]) -> int:
    """`python -m harness report RUN... [-o FILE.html]`; returns the exit code, 2 by way of UsageError."""
    if (options := options_of(ReportOptions, argv)) is None:
        return 0
    folders = [find_run(name, options.results_dir) for name in options.runs]
    output = (
        options.output or Path("reports") / f"{folders[0].name if len(folders) == 1 else 'comparison'}.html"
    )
    made = write_report(
        folders, output, static=options.static, focus="mfu" if options.mfu else "", figures=options.figures
    )
    for problem in made.problems:
        raw_output.notify(f"warning: {problem}\n")
    sys.stdout.write(f"report   {made.html}\nmarkdown {made.markdown}\n")
    return 0


def write_report(
    run_dirs: Sequence[Path],
    out_path: Path,
    static: bool = False,
    focus: Literal["", "mfu"] = "",
    figures: bool = False,
) -> ReportPaths:
    """Writes the report of some runs: a pure function of what is stored.

    Args:
        run_dirs: run folders (or folders above them, or Parquet files), of one machine or of several.
        out_path: the HTML file; the markdown twin takes the same name with `.md`.
        static: leave out the JavaScript.
        focus: "mfu" puts MFU first, or the reason why there is none.
        figures: write each figure into `<name>_figures/` too, where the markdown twin shows it from.

    Raises:
        UsageError: a path is missing or is no run, there is no row to show, or out_path can't be written.
    """
    # Drawing is imported here, so that `--help` and a refused path stay quick.
    from harness.report.render import render
    from harness.report.runs import load

    if out_path.suffix != ".html":
        raise UsageError(f"the report {out_path} must be named *.html")
    beside = out_path.with_name(f"{out_path.stem}_figures")
    collected = gc.isenabled()
    gc.disable()  # a report lets go of nothing before its end: looking for garbage takes a tenth of its time
    try:
        material = load(run_dirs, out_path.parent)
        page = render(material, static, focus, beside.name if figures else "")
    finally:
        if collected:
            gc.enable()
    twin = out_path.with_suffix(".md")
    try:
        out_path.parent.mkdir(parents=True, exist_ok=True)
        _replace(out_path, page.html)
        _replace(twin, page.markdown)
        if figures:
            _write_figures(beside, page.figures)
    except OSError as error:
        raise UsageError(
            f"cannot write {out_path} ({error.strerror}); choose another place with -o FILE.html"
        ) from error
    return ReportPaths(out_path, twin, material.problems)


def _replace(path: Path, text: str) -> None:
    """Writes a file at once: who has the report of a running sweep open never reads half of it."""
    with written(path) as file:
        file.write(text.encode())


def _write_figures(folder: Path, figures: Mapping[str, str]) -> None:
    """Writes figures by name; those of an earlier report that are no longer drawn are removed."""
    folder.mkdir(exist_ok=True)
    for name, content in figures.items():
        (folder / name).write_text(content, encoding="utf-8")
    for stale in {path.name for path in folder.glob("*.svg")} - figures.keys():
        (folder / stale).unlink()
