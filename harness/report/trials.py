"""Trials: what each trial of a training loop (`harness.ab`) answered, line by line."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from harness.report.table import Cell, Column, Table, make_table

if TYPE_CHECKING:
    from harness.report.runs import Machine


def answers(machine: Machine) -> Table:
    """A row a line of each trial's answer, as it was printed; a CPU's says that its times decide nothing."""
    rows = []
    for run in machine.runs:
        told = run.about.get("answer")
        if not isinstance(told, list):
            continue
        for place, line in enumerate(told):
            rows.append((Cell(run.run_id if place == 0 else "", run.run_id), str(line)))
    columns = (Column("trial", itemgetter(0)), Column("answer", itemgetter(1)))
    return make_table(f"trials-{machine.env_id}", columns, rows, sortable=False)
