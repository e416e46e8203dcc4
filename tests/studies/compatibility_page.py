"""What runs in parallel with what: docs/compatibility.md from rows of the suite `parallel`.

python tests/studies/compatibility_page.py results/published > docs/compatibility.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.compatibility import INTRO, SUITE, matrix, reasons
from harness.report.facts import described
from harness.report.markup import cell_markdown
from harness.report.runs import load

if TYPE_CHECKING:
    from harness.report.runs import Material

HEAD = """\
# What runs in parallel with what

Written from results: `python tests/studies/compatibility_page.py results/published > docs/compatibility.md`, after
`python -m harness sweep=parallel`, which runs every cell. Do not edit: a test compares this page with the results.
"""


def page(material: Material) -> str:
    """The page, a table of cells and one of reasons for each machine that ran the suite."""
    lines = [HEAD, INTRO]
    for machine in material.machines:
        if SUITE not in machine.suites:
            continue
        lines += ["", f"## {machine.name}", "", described(machine)]
        for title, table in (("", matrix(machine)), ("### Reasons\n\n", reasons(machine))):
            titles = " | ".join(column.title for column in table.columns)
            rule = "|".join(" ---: " if column.numeric else " --- " for column in table.columns)
            lines += ["", f"{title}| {titles} |", f"|{rule}|"]
            lines += [f"| {' | '.join(map(cell_markdown, row))} |" for row in table.rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(load([Path(sys.argv[1])], Path())))
