"""What runs in parallel with what: docs/compatibility.md from rows of the suite `parallel`.

python reports/studies/compatibility_page.py results/published > docs/compatibility.md
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.facts import described
from harness.report.parallel import SUITE, matrix, reasons
from harness.report.runs import load
from harness.store.printer import cell_markdown, markdown_table

if TYPE_CHECKING:
    from harness.report.runs import Material

HEAD = """\
# What runs in parallel with what

Look up whether a way of training in parallel runs with a recipe, and computes what one process computes.

```
python -m harness sweep=parallel        # runs every cell on this machine; make published writes this page
```

Ranks trained a small Llama for some steps, and so did one process. `equal`: the losses are the same bit for bit. `runs`: they lie within
the bound that is named, 4 x what rounding alone does to one process's losses. The report of a run has every reason, also for weights and
activations that travel in high precision."""


def page(material: Material) -> str:
    """The page: for each machine that ran the suite the ways that are equal throughout, the other cells, and refusals."""
    lines = [HEAD]
    for machine in material.machines:
        if SUITE not in machine.suites:
            continue
        cells, why = matrix(machine), reasons(machine)
        alike = [row for row in cells.rows if all(cell.note == "bit for bit" for cell in row[2:])]
        others = [row for row in cells.rows if row not in alike]
        refused = [row for row in why.rows if not row[0].text.startswith("runs")]
        recipes = ", ".join(column.title for column in cells.columns[2:])
        lines += ["", f"## {machine.name}", "", described(machine), "", f"Equal with each of {recipes}:", ""]
        lines += [f"- {cell_markdown(row[0])} ({row[1].text} ranks)" for row in alike]
        lines += [
            "",
            "Others:",
            "",
            markdown_table(replace(cells, rows=others, caption="")),
            markdown_table(replace(why, rows=refused, caption="")).rstrip(),
        ]
    return "\n".join(lines).replace("runs; bit for bit", "equal") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(load([Path(sys.argv[1])], Path())))
