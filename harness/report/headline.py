"""Headline: one row an FP8 arm of a machine, with its speed, its exactness and its loss side by side; and the ledger of
what a page says there, each claim with its cases, conditions and the command that measures it again.

A number that is fast and wrong must not look good, so none stands alone. Each speed is that of the part that decides:
whole steps before layers before single GEMMs. On a CPU there is no speed to show, and its arms are rows by recipe.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from harness.judge import gathered
from harness.judge.model_title import title_of
from harness.judge.verdict.result import percent
from harness.machine import mfu
from harness.report.compared import names
from harness.report.records import SQNR, arm_records, fp8_by_arm, gemms, has_time, numerics_by_arm
from harness.report.runs import newest
from harness.report.standings import recipe, standings
from harness.report.table import STYLES, Cell, Column, Table, columns, filled, known, make_table, resolved_of
from harness.report.verdicts import what_of
from harness.store import text
from harness.store.case import arm_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.report.runs import Machine, Run
    from harness.report.standings import Standing
    from harness.report.table import Record

MOST_ROWS, MOST_OF_EACH = 14, 4  # of one machine; of each where there are several
NAMED_CASES = 6  # a claim about more cases is measured again by its whole sweep
# Where a run lies and what it went on from is no part of what was measured.
_PLACES = ("results_dir", "reports_dir", "resume", "resume_anyway", "dry_run", "cases")
HeadlineRow = tuple[Cell, ...]
Shown = tuple[Cell, "Sequence[Record]"]  # a number, and the rows that it rests on
NOTHING: Shown = Cell(""), ()
COLUMNS = columns("headline")


def headline_rows(machine: Machine, conditions: str, ledger: Ledger) -> list[HeadlineRow]:
    """A row an FP8 arm, the best first, with each of its numbers entered into the ledger."""
    made = {
        "speedup over bf16": _gain,
        "mixed MFU": _mixed_mfu,
        "worst SQNR (dB)": _worst,
        "FP8 GEMMs": proof,
        "loss": _loss,
    }
    rows = []
    for standing in standings(machine)[:MOST_ROWS]:
        what = what_of(standing.suite) if standing.suite else ""
        cells = [Cell(standing.arm, standing.arm)]
        for column in COLUMNS[1:-1]:
            make = made[column.title]
            cell, of = make(machine, standing)
            if cell.text and of:
                title = f"{column.title}, {what}" if make is _gain else column.title
                said = f"{title} {cell.text}" + (f" ({cell.interval})" if cell.interval else "")
                said = ", ".join(filter(None, (said, cell.note)))
                keys = {(r["run_id"], r["case_id"]) for r in of}
                cell = replace(cell, href=f"#{ledger.add(machine, conditions, standing.arm, said, keys)}")
            cells.append(cell)
        cases = {p["case_id"] for p in standing.pairs}
        note = [_title(machine, standing), text.plural(len(cases), "case") if cases else ""]
        rows.append((*cells, Cell(what, what, note=", ".join(filter(None, note)))))
    return rows


def headline(machine: Machine, rows: Sequence[HeadlineRow]) -> Table | None:
    """The rows of one machine as a table; None where no FP8 arm was measured."""
    left = len(standings(machine)) - len(rows)
    caption = f"{text.plural(left, 'more arm')} in the tables below." if left else ""
    return _table(f"headline-{machine.env_id}", rows, caption) if rows else None


def overview(rows: Mapping[Machine, Sequence[HeadlineRow]]) -> Table | None:
    """The best rows of each machine with its name; None where there is none."""
    whole = []
    for name, (machine, own) in zip(names(list(rows)), rows.items(), strict=True):
        for arm, *numbers in own[:MOST_OF_EACH]:
            whole.append((replace(arm, note=name, href=f"#m-{machine.env_id}"), *numbers))
    cut = any(len(own) > MOST_OF_EACH for own in rows.values())
    caption = f"The best {MOST_OF_EACH} arms of each machine." if cut else ""
    return _table("headline", whole, caption) if whole else None


def _table(key: str, rows: Sequence[HeadlineRow], caption: str) -> Table:
    return filled(Table(key, COLUMNS, tuple(rows), caption, sortable=False, as_cards=True))


def _title(machine: Machine, standing: Standing) -> str:
    """What training steps were of, as it really ran; "" for other suites, and where there are several."""
    cases = {(p["run_id"], p["case_id"]) for p in standing.pairs if standing.suite == "train"}
    rows = machine.pick(suite="train", arm=standing.arm, metric="time_ms", status="ok")
    found = {title_of(r) for r in rows if (r["run_id"], r["case_id"]) in cases}
    return found.pop() if len(found) == 1 else ""


def _gain(_: Machine, standing: Standing) -> Shown:
    return (standing.shown, standing.pairs) if standing.pairs else NOTHING


def _worst(machine: Machine, standing: Standing) -> Shown:
    """The least SQNR of the arm itself; of any arm of its recipe where it has none, or stands for the recipe."""
    every = [w for w in numerics_by_arm(machine) if w.fp8 and w.sqnr]
    own = [w for w in every if w.fields == standing.fields != standing.computes]
    own = own or [w for w in every if recipe(w.fields) == standing.computes]
    if not own:
        return NOTHING
    least = min(own, key=lambda w: w.worst[1])
    metric, value = least.worst
    style = "bad" if any(w.failing for w in own) else ""
    run, case = least.where[metric]
    cell = Cell(text.number(value), value, style, f"{SQNR[metric]}, {least.suite}")
    return cell, [{"run_id": run, "case_id": case}]


def _mixed_mfu(machine: Machine, standing: Standing) -> Shown:
    """Mixed MFU of training steps, by the causal count where there is one, since it counts what runs."""
    if standing.suite != "train":
        return NOTHING
    shares: list[float] = []
    flags: set[str] = set()
    rows = []
    for r in newest(arm_records(machine, "train"), has_time):
        converted = resolved_of(r).get("fp8_layers", 1)  # 0 where no layer is advised: the arm ran in bf16
        if r["arm"] == standing.arm and r["status"] == "ok" and converted:
            found = mfu.of_row(r, machine.device, machine.achieved or None)
            used = next(
                (u for u in reversed(found) if u.formula in mfu.EXECUTED), found[-1] if found else None
            )
            if used and known(used.mfu_mixed):
                shares.append(used.mfu_mixed)
                flags.update(used.doubts)
                rows.append(r)
    if not shares or flags:  # a share above 100 % stands in the table of MFU alone
        return Cell(
            text.NONE, None, "bad" if flags else "muted", "; ".join(sorted(flags)).replace("_", " ")
        ), rows
    ends = f"{text.percent(min(shares))} to {text.percent(max(shares))}"
    note = f"{ends}, range over {text.plural(len(shares), 'case')}" if len(shares) > 1 else ""
    middle = statistics.median(shares)
    return Cell(text.percent(middle), middle, note=note), rows


def proof(machine: Machine, standing: Standing) -> Shown:
    """FP8 GEMMs that a profiler saw of those expected; "" where nothing counted them."""
    arms = fp8_by_arm(machine).values()
    own = [r for rows in arms if arm_of(rows[0]) == standing.fields != standing.computes for r in rows]
    own = own or [r for rows in arms if recipe(arm_of(rows[0])) == standing.computes for r in rows]
    counts = [r for r in own if gemms(r).seen is not None]
    if not counts:
        direct = [r for r in own if gemms(r).direct]
        return (Cell("direct", "direct", note="float8 operands"), direct) if direct else NOTHING
    seen, due = (
        sum(each) for each in zip(*((ran.seen or 0, ran.due) for ran in map(gemms, counts)), strict=True)
    )
    return Cell(f"{seen} of {due}", seen / due if due else 0.0, "bad" if seen < due else ""), counts


def _loss(machine: Machine, standing: Standing) -> Shown:
    own = [v for v in machine.verdicts if v.fields == standing.computes]
    if not own:
        return NOTHING
    outcomes = Counter(v.verdict.outcome for v in own)
    outcome = own[0].verdict.outcome if len(outcomes) == 1 else ""
    words = outcome or ", ".join(f"{count} {word}" for word, count in outcomes.items())
    rows = machine.pick(metric="loss", run_id=[v.run_id for v in own])
    late = [g.effect for v in own if (g := v.verdict.gate("L4")) is not None and math.isfinite(g.effect)]
    note = f"late gap {percent(late[0])}" if len(own) == 1 and late else ""
    return Cell(words, words, STYLES.get(outcome, ""), note), [
        r for r in rows if arm_of(r) == standing.computes
    ]


# Claims


@dataclass(slots=True)
class Claim:
    """Numbers of a headline that rest on the same cases.

    Attributes:
        place: its number on the page.
        subject: whose numbers they are.
        rows: (run id, case id) of what they rest on.
        commands: what measures them again, a command a run.
        values: each number as the headline shows it, with what it is.
    """

    place: int
    subject: str
    rows: Sequence[tuple[str, str]]
    commands: str
    values: list[str]


@dataclass(slots=True)
class Ledger:
    """Collects the claims of a page in the order in which they are made, by conditions, subject and rows."""

    claims: dict[Any, Claim] = field(default_factory=dict)

    def add(
        self, machine: Machine, conditions: str, subject: str, value: str, rows: Iterable[tuple[str, str]]
    ) -> str:
        """Enters a number as it is shown, with what it rests on; returns the id of its claim within the page, "claim-3"."""
        rows = tuple(sorted(rows))
        cases = gathered(rows)
        commands = dict.fromkeys(again(run, cases[run.run_id]) for run in machine.runs if run.run_id in cases)
        made = Claim(len(self.claims) + 1, subject, rows, "\n".join(commands), [])
        claim = self.claims.setdefault((conditions, subject, rows), made)
        claim.values.append(value)
        return f"claim-{claim.place}"

    def tables(self) -> list[Table]:
        """The ledger, a table for each set of conditions, its claims in the order of the page."""
        groups = gathered((key[0], claim) for key, claim in self.claims.items())
        return [_claims(i, conditions, own) for i, (conditions, own) in enumerate(groups.items())]


def _claims(place: int, conditions: str, claims: Sequence[Claim]) -> Table:
    runs = {run for claim in claims for run, _ in claim.rows}

    def cases(claim: Claim) -> Cell:
        own, every = (list(dict.fromkeys(key[i] for key in claim.rows)) for i in (0, 1))
        return Cell(text.some(every, 3), style="id", note=f"run {text.some(own, 2)}" if len(runs) > 1 else "")

    columns = (
        Column("", lambda c: Cell(str(c.place), anchor=f"claim-{c.place}")),
        Column("claim", "subject"),
        Column("value", lambda c: "; ".join(c.values)),
        Column("cases", cases),
        Column("measure it again", lambda c: Cell(c.commands, style="command")),
    )
    caption = f"{conditions}." + (f" Run {next(iter(runs))}." if len(runs) == 1 else "")
    return make_table(f"claims-{place}", columns, claims, caption, sortable=False)


def again(run: Run, cases: Iterable[str]) -> str:
    """The command that measures cases of a run again; the whole sweep where they are many."""
    try:
        words = shlex.split(str(run.about.get("command", "")))
    except ValueError:  # quotes that do not match: no shell wrote it
        words = []
    if words[1:3] != ["-m", "harness"] or not any(w.startswith("sweep=") for w in words):
        words = ["python", "-m", "harness", f"sweep={run.sweep}"]
    kept = [word for word in words if word.partition("=")[0] not in _PLACES]
    chosen = sorted(set(cases))
    if len(chosen) <= NAMED_CASES:
        kept.append(f"cases=[{','.join(chosen)}]")
    return shlex.join(kept)
