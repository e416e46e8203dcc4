"""Plain casts: what `.to()`, and fp8core beside it, make of every pattern, by version of torch; rows of the study `codes`.

    python reports/studies/plain_casts.py results/published reports/published/studies/plain-casts.md     writes the table into that page

Nothing here is asserted: a cell without a row is empty. Where several runs have the same cell, the newest one counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from documented_table import fill

from harness.report.table import resolved_of
from harness.store import text
from harness.store.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.report.runs import Machine

SUITE = "codes"
INPUTS = {
    "normal": "normal",
    "subnormal": "subnormal",
    "overflow": "overflow",
    "infinity": "Inf",
    "nan": "NaN",
}
ARMS = {
    "plain": "`.to()`",
    "saturating": "fp8core",
    "saturating_compile": "fp8core, compiled",
    "kernels": "fp8core's kernels",
}
Key = tuple[str, str, str, str]  # arm, dtype, source, kind of input


def block(machines: Sequence[Machine]) -> str:
    """The table and the conditions below it, in markdown."""
    measured = [machine for machine in machines if SUITE in machine.suites]
    found: dict[str, dict[Key, str]] = {}
    for machine in measured:
        found.setdefault(_environment(machine), {}).update(_cells(machine))
    titles = [
        "cast",
        *(f"{env}: {kind}" if i == 0 else kind for env in found for i, kind in enumerate(INPUTS.values())),
    ]
    lines = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    lines += [f"| {' | '.join(row)} |" for row in _rows(found)]
    lines += ["", 'Codes that differ from the rule above, of all patterns of a kind; "all" is every one.', ""]
    lines += [f"- {_environment(machine)}: {_conditions(machine)}" for machine in measured]
    return "\n".join(lines)


def _environment(machine: Machine) -> str:
    """What decides what a cast does: the version of torch, and of CUDA where a GPU casts."""
    torch = str(machine.env.get("torch") or "unknown").partition("+")[0]
    return f"torch {torch}, " + (f"CUDA {machine.env.get('cuda')}" if machine.is_gpu else "CPU")


def _conditions(machine: Machine) -> str:
    own = machine.frame[machine.frame["suite"] == SUITE]
    days = sorted({str(time)[:10] for time in own["created_at"]})
    commits = dict.fromkeys(commit for commit in own["commit"] if commit)
    return ", ".join([machine.name.removeprefix("CPU: "), *days, *(f"commit {commit}" for commit in commits)])


def _cells(machine: Machine) -> dict[Key, str]:
    own = machine.frame[(machine.frame["suite"] == SUITE)]
    own = own[(own["metric"] == "mismatches") | (own["status"] == "failed")]
    cells: dict[Key, str] = {}
    for row in sorted(rows_of(own), key=lambda r: str(r["created_at"])):
        axes = text.axes_of(row["axes"])
        key = (row["arm"], str(axes["dtype"]), str(axes["source"]), str(axes["inputs"]))
        if row["status"] == "failed":
            cells[key] = "failed"
        elif row["status"] == "ok":
            wrong, patterns = int(row["value"]), int(resolved_of(row).get("patterns") or 0)
            cells[key] = "0" if not wrong else "all" if wrong == patterns else f"{wrong:,} of {patterns:,}"
    return cells


def _rows(found: Mapping[str, Mapping[Key, str]]) -> Iterator[tuple[str, ...]]:
    """A row an arm and format; sources of which all cells say the same share one."""
    keys = {key[:3] for cells in found.values() for key in cells}
    dtypes, sources = ([*dict.fromkeys(key[i] for key in sorted(keys))] for i in (1, 2))
    for arm, dtype in ((a, d) for a in ARMS for d in dtypes):
        alike: dict[tuple[str, ...], list[str]] = {}
        for source in sources:
            if (arm, dtype, source) in keys:
                texts = tuple(
                    cells.get((arm, dtype, source, i), "") for cells in found.values() for i in INPUTS
                )
                alike.setdefault(texts, []).append(source)
        for texts, of in alike.items():
            yield (f"{ARMS[arm]} to {dtype} from {', '.join(of)}", *texts)


def main(words: Sequence[str]) -> int:
    """Writes the table of some runs into a page."""
    from harness.report.runs import load

    *runs, page = map(Path, words)
    fill(page, {"casts": block(load(runs, Path()).machines)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
