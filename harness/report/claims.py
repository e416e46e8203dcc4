"""Claims: the ledger of what a report says in its headlines, each with its cases, conditions and the command that
measures it again.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.table import Cell, Column, Table, make_table
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from harness.report.runs import Machine, Run

NAMED_CASES = 6  # a claim about more cases is measured again by its whole sweep
# Where a run lies and what it went on from is no part of what was measured.
_PLACES = ("results_dir", "reports_dir", "resume", "resume_anyway", "dry_run", "cases")


@dataclass(slots=True)
class Claim:
    """Numbers of a headline that rest on the same cases.

    Attributes:
        subject: whose numbers they are.
        rows: (run id, case id) of what they rest on.
        conditions: device, power limit, versions, commit, date.
        commands: what measures them again, a command a run.
        values: each number as the headline shows it, with what it is.
    """

    subject: str
    rows: tuple[tuple[str, str], ...]
    conditions: str
    commands: tuple[str, ...]
    values: list[str]


class Ledger:
    """Collects the claims of a page in the order in which they are made."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def add(
        self, machine: Machine, conditions: str, subject: str, value: str, rows: Iterable[tuple[str, str]]
    ) -> str:
        """Enters a number.

        Args:
            machine: where it was measured.
            conditions: of the machine, in a line.
            subject: whose number it is.
            value: the number as it is shown, with what it is.
            rows: (run id, case id) of what it rests on.

        Returns:
            The id of the claim within the page, "claim-3".
        """
        rows = tuple(sorted(set(rows)))
        for number, claim in enumerate(self.claims, 1):
            if (claim.subject, claim.conditions, claim.rows) == (subject, conditions, rows):
                claim.values.append(value)
                return f"claim-{number}"
        by_run: dict[str, list[str]] = {}
        for run_id, case_id in rows:
            by_run.setdefault(run_id, []).append(case_id)
        known = {run.run_id: run for run in machine.runs}
        commands = dict.fromkeys(again(known[r], cases) for r, cases in by_run.items() if r in known)
        self.claims.append(Claim(subject, rows, conditions, tuple(commands), [value]))
        return f"claim-{len(self.claims)}"

    def tables(self) -> list[Table]:
        """The ledger, a table for each set of conditions, its claims in the order of the page."""
        groups: dict[str, list[tuple[int, Claim]]] = {}
        for number, claim in enumerate(self.claims, 1):
            groups.setdefault(claim.conditions, []).append((number, claim))
        return [_table(i, conditions, own) for i, (conditions, own) in enumerate(groups.items())]


def _table(place: int, conditions: str, claims: Sequence[tuple[int, Claim]]) -> Table:
    runs = {run for _, claim in claims for run, _ in claim.rows}

    def cases(numbered: tuple[int, Claim]) -> Cell:
        rows = numbered[1].rows
        own = tuple(dict.fromkeys(run for run, _ in rows))
        named = text.some(tuple(dict.fromkeys(case for _, case in rows)), 3)
        return Cell(named, style="id", note=f"run {text.some(own, 2)}" if len(runs) > 1 else "")

    columns = (
        Column("", lambda c: Cell(str(c[0]), anchor=f"claim-{c[0]}")),
        Column("claim", lambda c: c[1].subject),
        Column("value", lambda c: "; ".join(c[1].values)),
        Column("cases", cases),
        Column("measure it again", lambda c: Cell("\n".join(c[1].commands), style="command")),
    )
    caption = f"{conditions}." + (f" Run {next(iter(runs))}." if len(runs) == 1 else "")
    return make_table(f"claims-{place}", columns, claims, caption, sortable=False)


def again(run: Run, cases: Iterable[str]) -> str:
    """The command that measures cases of a run again; the whole sweep where they are many."""
    try:
        words = shlex.split(run.command)
    except ValueError:  # quotes that do not match: no shell wrote it
        words = []
    if words[1:3] != ["-m", "harness"] or not any(w.startswith("sweep=") for w in words):
        words = ["python", "-m", "harness", f"sweep={run.sweep}"]
    kept = [word for word in words if word.partition("=")[0] not in _PLACES]
    chosen = sorted(set(cases))
    if len(chosen) <= NAMED_CASES:
        kept.append(f"cases=[{','.join(chosen)}]")
    return shlex.join(kept)
