"""The published page: the ledger of public FP8 runs, then our own rows with their MFU.

python reports/studies/published_page.py results/published reports/published/mfu.html
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from harness.report import write_report
from harness.report.section import Section
from harness.report.table import Column, make_table
from harness.store.printer import Cell

LEDGER = Path(__file__).parents[2] / "docs" / "evidence.csv"
INTRO = (
    "Measured by others, who are named in the last column; the verdict is ours, by one rule (docs/evidence.md): gap of the losses, "
    "margin 0.25 % of the base's loss. One run a side decides nothing."
)


def ledger() -> Section:
    """The lines of docs/evidence.csv."""
    with LEDGER.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        records = list(lines)
    columns = [
        Column(name, lambda r, name=name: Cell(r[name], r[name])) for name in (*(lines.fieldnames or ()),)
    ]
    table = make_table("public-runs", columns, records, sortable=False)
    return Section("public", "Public FP8 runs, judged by one rule", INTRO, tables=[table])


if __name__ == "__main__":
    rows, page = map(Path, sys.argv[1:])
    write_report([rows], page, focus="mfu", figures=True, others=[ledger()])
