"""What README.md, PACKAGE.md and results/README.md say of the published GPU rows: cells and sentences of the report, not retyped.

python reports/studies/published_results.py
"""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path

from documented_table import fill

from harness.report.headline import COLUMNS, headline_rows
from harness.report.runs import load
from harness.store.printer import Cell, Table, markdown_table, table

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published" / "h200"
PAGES = (ROOT / "README.md", ROOT / "PACKAGE.md", ROOT / "results" / "README.md")
SHOWN = (
    "FP8 arm",
    "speedup over bf16",
    "time (ms)",
    "tokens/s",
    "mixed MFU",
    "mJ/token",
    "worst SQNR (dB)",
    "FP8 GEMMs",
)


def by_run(published: Path = PUBLISHED) -> Table:
    """The table of arms of each run by itself."""
    places = [i for i, column in enumerate(COLUMNS) if column.title in SHOWN]
    rows = [
        [Cell(folder.name), *(cells[i] for i in places)]
        for folder in sorted({file.parent for file in published.rglob("*.parquet")})
        for machine in load([folder], ROOT).machines
        for cells in headline_rows(machine)
        if cells[places[1]].text
    ]
    columns = [f"{'>' * COLUMNS[i].numeric}{COLUMNS[i].title}" for i in places]
    return table("", ["run", *columns], rows)


def sentence(published: Path = PUBLISHED) -> str:
    """Every arm of the training steps with its gain, of all runs together, and all that qualifies it."""
    (machine,) = load([published], ROOT).machines
    return "; ".join(
        f"{arm.text} {gain.text} ({', '.join(filter(None, (gain.interval, gain.note, arm.note)))})"
        for arm, gain, *_ in headline_rows(machine)
    )


@cache
def tables() -> dict[str, str]:
    """The text of each mark."""
    return {
        "measured": textwrap.fill(f"{sentence()}.", 140, break_on_hyphens=False),
        "arms": markdown_table(by_run()).rstrip(),
    }


if __name__ == "__main__":
    for page in PAGES:
        fill(page, tables())
