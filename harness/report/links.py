"""Links: how fast bytes went between ranks, which link is out of line, and the matrix of messages (`harness.judge.fleet`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import store
from harness.judge.fleet import link_tables
from harness.judge.fleet.links import judge
from harness.machine.links import SUITE
from harness.report.section import Section
from harness.report.table import Cell, Column, Table

if TYPE_CHECKING:
    from harness.judge.fleet.links import Links
    from harness.report.runs import Machine


def section(machine: Machine) -> Section:
    """The section of a machine, which is that of rank 0; empty where no link was measured."""
    if SUITE not in machine.suites:
        return Section(f"links-{machine.env_id}", "Links between ranks")
    links = _judged(machine)
    words = " ".join([*link_tables.lines(links), f"In sum: {link_tables.verdict(links)}."])
    tables = []
    for number, (title, columns, rows) in enumerate(link_tables.tables(links)):
        heads = tuple(Column(name.lstrip(">"), numeric=name.startswith(">")) for name in columns)
        cells = tuple(tuple(Cell(text) for text in row) for row in rows)
        tables.append(Table(f"links-{machine.env_id}-{number}", heads, cells, title, sortable=False))
    if not tables and links.asked:  # a section without one is not shown
        said = ((Cell(link_tables.verdict(links)),),)
        tables.append(Table(f"links-{machine.env_id}", (Column("in sum"),), said, "Links", sortable=False))
    folded = not (machine.is_gpu or links.outliers or links.failed)
    return Section(f"links-{machine.env_id}", "Links between ranks", words, first=tables, folded=folded)


def _judged(machine: Machine) -> Links:
    """By rows with all attempts: bytes that arrived wrong once are not taken back."""
    files = [file.path for run in machine.runs for file in run.files]
    frame, _ = store.read_quietly(files, where={"suite": SUITE, "env_id": machine.env_id}, all_attempts=True)
    states = {run.run_id: run.state for run in machine.runs}
    return judge(frame, states, unread=frame.attrs["problems"])
