"""Trials: what each trial of a training loop (`harness.ab`) answered, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report.table import Cell, table_of

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.report.table import Table


def trials(machine: Machine) -> Table:
    """A row a line of each trial's answer, as it was printed; a CPU's says that its times decide nothing."""
    rows = []
    for run in machine.runs:
        told = run.about.get("answer")
        for place, line in enumerate(told if isinstance(told, list) else ()):
            rows.append({"trial": Cell(run.run_id if place == 0 else "", run.run_id), "answer": str(line)})
    return table_of(machine, "trials", rows, sortable=False)
