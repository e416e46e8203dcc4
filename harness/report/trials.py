"""Trials: what each trial of a training loop (`harness.ab`) answered, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report.table import Cell, Column, Table

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
            rows.append((Cell(run.run_id if place == 0 else "", run.run_id), Cell(str(line))))
    columns = (Column("trial"), Column("answer"))
    return Table(f"trials-{machine.env_id}", columns, tuple(rows), sortable=False)
