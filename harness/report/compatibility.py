"""Compatibility: which ways of training in parallel run with which recipes, as rows of the suite `parallel` say.

Nothing here is asserted: a cell without a row is empty. Where several runs have the same cell, the newest one counts.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from harness.report.table import Cell, Column, Record, Table, make_table, number, resolved_of
from harness.store import text
from harness.store.cause import Cause
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from harness.report.runs import Machine

SUITE = "parallel"
REFUSES = "refuses: "  # before what fp8core said; the word of the cell says it already
INTRO = (
    "Each cell was run: ranks trained a small Llama for some steps, and so did one process. It runs if the losses are the "
    "same bit for bit, or within the bound that is named. The bound is 4 x what rounding alone does to one process's "
    "losses; it is 0 where ranks make the same sums in the same order."
)


def matrix(machine: Machine) -> Table:
    """A row for each way, a column for each recipe."""
    found = _newest(machine)
    ways = list(dict.fromkeys(way for way, _ in found))
    recipes = list(dict.fromkeys(recipe for _, recipe in found))

    def resolved(way: str, name: str) -> Any:
        """What the cells of a way say of themselves; None where none does."""
        own = [resolved_of(found[way, recipe]) for recipe in recipes if (way, recipe) in found]
        return next((r[name] for r in own if r.get(name)), None)

    def cell(recipe: str, way: str) -> Cell:
        return _cell(found.get((way, recipe)))

    columns = [
        Column("way", lambda way: Cell(way, note=resolved(way, "doc") or "")),
        number("ranks", lambda way: resolved(way, "world"), text.count),
        *(Column(recipe, partial(cell, recipe)) for recipe in recipes),
    ]
    return make_table(f"compatibility-{machine.env_id}", columns, ways, sortable=False)


def reasons(machine: Machine) -> Table:
    """Why what does not run does not, and what runs otherwise than asked."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = {}  # (what, reason) -> way -> recipes
    for (way, recipe), record in _newest(machine).items():
        for what, reason in _notes(record):
            by_reason.setdefault((what, reason), {}).setdefault(way, []).append(recipe)
    rows = []
    for (what, reason), ways in sorted(by_reason.items()):
        alike: dict[str, list[str]] = {}  # recipes -> the ways in which it is they
        for way, recipes in ways.items():
            alike.setdefault(", ".join(recipes), []).append(way)
        for recipes_of, of in alike.items():
            rows.append((Cell(what, what, _STYLES.get(what, "")), ", ".join(of), recipes_of, reason))
    titles = ("what", "ways", "recipes", "reason")
    columns = [Column(title, itemgetter(i)) for i, title in enumerate(titles)]
    return make_table(f"compatibility-reasons-{machine.env_id}", columns, rows)


def _notes(record: Record) -> list[tuple[str, str]]:
    """What is to be said of a cell beside that it runs."""
    if record["status"] != "ok":
        return [(_word(record), text.reason(str(record["reason"])).removeprefix(REFUSES))]
    found = []
    for key, what in _OTHERWISE.items():
        value = resolved_of(record).get(key)
        given = value if isinstance(value, list) else [value]
        found += [(f"runs, {what}", str(way)) for way in given if way and way != "fp8"]
    return found


_OTHERWISE = {
    "emulated": "emulated",
    "weights_gathered_as": "weights",
    "activations_gathered_as": "activations",
}
_STYLES = {"failed": "bad", "refuses": "muted", "unsupported here": "muted"}


def _newest(machine: Machine) -> dict[tuple[str, str], Record]:
    """(way, recipe) -> its row: that of the deviation where it ran, else the one that says why not."""
    frame = machine.frame
    own = frame[
        (frame["suite"] == SUITE) & ((frame["metric"] == "loss_deviation") | (frame["status"] != "ok"))
    ]
    return {(str(text.axes_of(r["axes"])["cell"]), r["arm"]): r for r in sorted(rows_of(own), key=_when)}


def _when(record: Record) -> tuple[str, ...]:
    return (str(record["run_id"]),)  # begins with its time; rows of one run keep their order


def _word(record: Record) -> str:
    if record["status"] == "failed":
        return "failed"
    return "refuses" if record["cause"] == Cause.REFUSED else "unsupported here"


def _cell(record: Record | None) -> Cell:
    if record is None:
        return Cell("", None)
    if record["status"] != "ok":
        word = _word(record)
        return Cell(word, word, _STYLES[word])
    bound, apart = resolved_of(record).get("bound"), record["value"]
    if apart == 0:
        return Cell("runs", "runs", note="bit for bit")
    return Cell("runs", "runs", note=f"{text.number(apart, 2)}, bound {text.number(bound, 2)}")
