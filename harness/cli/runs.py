"""`python -m harness runs`: the runs of a results folder, newest first, on the terminal and as `index.html` of the reports folder."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from harness.engine.run_folder import newest_first
from harness.engine.runlog import notes, progress
from harness.machine import terminal
from harness.report import standings, verdicts
from harness.report.render import render_sections
from harness.report.runs import load
from harness.report.section import Section
from harness.report.table import Column, make_table
from harness.store import run_state
from harness.store.errors import UsageError
from harness.store.printer import Cell
from harness.store.words import key, options_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Words:
    """python -m harness runs: the runs of a results folder, newest first: what, where, state, what its rows say, its page"""

    last: int = key("how many", 20, span=(1, 10_000))
    results_dir: str = key("folder of the runs", "results")
    reports_dir: str = key("folder of the pages; index.html is written there", "reports")


@dataclass(frozen=True, slots=True)
class Seen:
    """One run in words; `page` is "" where none is written."""

    run_id: str
    began: str  # day and minute, UTC
    state: str
    subject: str
    says: str
    page: str


def main(argv: Sequence[str]) -> int:
    """Prints the runs and writes the index; exit code 0.

    Raises:
        UsageError: there is no run, or the index can't be written.
    """
    if (options := options_of(Words, argv)) is None:
        return 0
    reports = Path(options.reports_dir)
    folders, older = newest_first(Path(options.results_dir), "**", options.last)
    if not folders:
        raise UsageError(f"no run in {options.results_dir}; measure first: python -m harness sweep=quick")
    runs = [seen(folder, reports) for folder in folders]
    out, index = terminal.console(), reports / "index.html"
    for run in runs:
        terminal.say(out, f"{run.run_id}  {run.state}  {run.began}  {run.subject}")
        for line in filter(None, (run.says, run.page)):
            terminal.say(out, f"    {line}")
    if older:
        terminal.say(out, f"{older} older: last={len(runs) + older} shows them")
    columns = (
        Column("run", lambda r: Cell(r.subject, href=f"{quote(r.run_id)}.html" if r.page else "")),
        *(Column(name, name) for name in ("says", "state", "began", "run_id")),
    )
    listed = replace(make_table("runs", columns, runs, sortable=False), as_cards=True)
    left = f"{older} older ones are not shown." if older else ""
    page = render_sections("Runs, newest first", "", "", [Section("runs", "", left, first=[listed])])
    try:
        reports.mkdir(parents=True, exist_ok=True)
        index.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {index}: {error.strerror}; reports_dir=DIR names another") from error
    terminal.say(out, f"index    {index}")
    return 0


def seen(folder: Path, reports: Path) -> Seen:
    """What is to be said of one run."""
    about = run_state.about(folder)
    state = progress(notes(folder), time.time()) or str(about.get("state", run_state.UNKNOWN))
    began = str(about.get("started_at", ""))[:16].replace("T", " ")
    page = reports / f"{folder.name}.html"
    shown = os.fspath(page) if page.exists() else ""
    try:
        machines = load([folder], reports).machines
    except UsageError as error:
        says = str(error) if any(folder.rglob("*.parquet")) else "no rows"
        return Seen(folder.name, began, state, str(about.get("sweep", "")), says, shown)
    says = " ".join(standings.lead(m, verdicts.answers(m))[0] for m in machines)
    return Seen(folder.name, began, state, "; ".join(m.subject for m in machines), says, shown)
