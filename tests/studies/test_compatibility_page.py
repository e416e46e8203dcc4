"""docs/compatibility.md is what the published rows say, and every cell of it was run."""

from __future__ import annotations

from pathlib import Path

from compatibility_page import page

from harness.report.parallel import matrix
from harness.report.runs import load

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_published_rows_say() -> None:
    """Run `make published` where this fails."""
    material = load([ROOT / "results" / "published"], ROOT)
    assert (ROOT / "docs" / "compatibility.md").read_text() == page(material)
    own = next(m for m in material.machines if "parallel" in m.suites)
    cells = [cell.text for row in matrix(own).rows for cell in row[2:]]
    assert all(cells)
    assert cells.count("runs") >= 40
