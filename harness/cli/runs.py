"""`python -m harness runs`: the runs of a results folder, newest first, on the terminal and as `index.html` of the reports folder."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from harness.engine.run_folder import newest_first
from harness.engine.runlog import notes, progress
from harness.machine import terminal
from harness.report.first_screen import FirstScreen
from harness.report.render import render_sections
from harness.report.runs import load
from harness.report.section import Section
from harness.report.table import Column, make_table
from harness.store import printer, run_state, text
from harness.store.errors import UsageError
from harness.store.printer import Cell, picked
from harness.store.words import key, options_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store.printer import Table, Tone


@dataclass(frozen=True, slots=True)
class RunsOptions:
    """python -m harness runs: the runs of a results folder, newest first: what, where, state, what its rows say, its page"""

    last: int = key("how many", 20, span=(1, 10_000))
    results_dir: str = key("folder of the runs", "results")
    reports_dir: str = key("folder of the pages; index.html is written there", "reports")
    json: bool = key("as plain values", False)


PROVENANCE = "provenance.yaml"  # says where published runs come from


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run in words; `page` is "" where none is written.

    `whose` is "mine" for a sweep of this folder, "published" below a provenance.yaml, else what made it: gate, trial, import, ...
    """

    run_id: str
    began: str  # day and minute, UTC
    state: str
    whose: str
    subject: str
    says: str
    page: str


@dataclass(frozen=True, slots=True)
class RunList:
    """The newest runs, and how many more there are."""

    runs: Sequence[ListedRun]
    older: int
    index: Path

    @property
    def tone(self) -> Tone:
        """None: a list is neither good nor bad."""
        return ""

    def lines(self) -> list[str]:
        """How many, then each run, what it says and its page."""
        more = f"; {self.older} older: last={len(self.runs) + self.older} shows them" if self.older else ""
        found = [f"{text.plural(len(self.runs), 'run')}, newest first{more}"]
        for run in self.runs:
            found.append("  ".join((run.run_id, run.state, run.began, run.whose, run.subject)))
            found += [f"    {line}" for line in (run.says, run.page) if line]
        return [*found, f"index    {self.index}"]

    def tables(self) -> list[Table]:
        """None: the lines hold all."""
        return []

    def data(self) -> dict[str, Any]:
        """Plain values."""
        names = "run_id began state whose subject says page"
        return {"runs": [picked(run, names) for run in self.runs], "older": self.older}


def main(argv: Sequence[str]) -> int:
    """Prints the runs and writes the index; exit code 0.

    Raises:
        UsageError: there is no run, or the index can't be written.
    """
    if (options := options_of(RunsOptions, argv)) is None:
        return 0
    reports = Path(options.reports_dir)
    folders, older = newest_first(Path(options.results_dir), "**", options.last)
    if not folders:
        raise UsageError(f"no run in {options.results_dir}; measure first: python -m harness sweep=quick")
    runs = [listed_run(folder, reports) for folder in folders]
    found = RunList(runs, older, reports / "index.html")
    columns = (
        Column("run", lambda r: Cell(r.subject, href=f"{quote(r.run_id)}.html" if r.page else "")),
        *(Column(name, name) for name in ("says", "state", "whose", "began", "run_id")),
    )
    listed = replace(make_table("runs", columns, runs, sortable=False), as_cards=True)
    left = f"{older} older ones are not shown." if older else ""
    page = render_sections("Runs, newest first", "", "", [Section("runs", "", left, first=[listed])])
    try:
        reports.mkdir(parents=True, exist_ok=True)
        found.index.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {found.index}: {error.strerror}; reports_dir=DIR names another"
        ) from error
    printer.show(found, terminal.console(), as_program=options.json)
    return 0


def listed_run(folder: Path, reports: Path) -> ListedRun:
    """One run with its state, whose it is and what its rows say."""
    about = run_state.about(folder)
    is_published = any((above / PROVENANCE).exists() for above in folder.parents)
    made_by = run_state.made_by(about)
    whose = "published" if is_published else "mine" if made_by in ("sweep", "launch") else made_by
    state = progress(notes(folder), time.time()) or str(about.get("state", run_state.UNKNOWN))
    began = str(about.get("started_at", ""))[:16].replace("T", " ")
    page = reports / f"{folder.name}.html"
    shown = os.fspath(page) if page.exists() else ""
    try:
        machines = load([folder], reports).machines
    except UsageError as error:
        summary = str(error) if any(folder.rglob("*.parquet")) else "no rows"
        return ListedRun(folder.name, began, state, whose, str(about.get("sweep", "")), summary, shown)
    summary = " ".join(FirstScreen.of(m).lines()[0] for m in machines)
    return ListedRun(folder.name, began, state, whose, "; ".join(m.subject for m in machines), summary, shown)
