"""Compatibility: which ways of training in parallel run with which recipes, as rows of the suite `parallel` say.

    python -m harness.report.compatibility RUN... > docs/compatibility.md
    python -m harness.report.compatibility --details RUN... > docs/compatibility-details.md

Nothing here is asserted: a cell without a row is empty. Where several runs have the same cell, the newest one counts.
"""

from __future__ import annotations

import sys
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output
from harness.report.facts import described
from harness.report.table import Cell, Column, Record, Table, make_table, number, resolved_of
from harness.store import text
from harness.store.cause import Cause
from harness.store.compare import rows_of
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine

SUITE = "parallel"
EAGER = {"compile": "fsdp2", "tp_compile": "tp", "sp_compile": "sp"}  # the eager way of a compiled one
REFUSES = "refuses: "  # before what fp8core said; the word of the cell says it already
INTRO = (
    "Each cell was run: ranks trained a small Llama for some steps, and so did one process. It runs if the losses are the "
    "same bit for bit, or within the bound that is named. The bound is 4 x what rounding alone does to one process's "
    "losses; it is 0 where ranks make the same sums in the same order."
)
DETAILS = (
    "[Compiled blocks and bytes sent](compatibility-details.md) has losses, graphs and bytes of each cell."
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


def sent(machine: Machine) -> Table:
    """What a rank gives to collectives in a step, for each way and recipe that sends something else than the one before."""
    kinds: dict[str, None] = {}
    lines: dict[tuple[str, tuple[tuple[str, float], ...]], list[str]] = {}
    for (way, recipe), record in _newest(machine).items():
        own = resolved_of(record).get("sent_bytes_per_step")
        if record["status"] == "ok" and own:
            kinds |= dict.fromkeys(own)
            lines.setdefault((way, tuple(sorted(own.items()))), []).append(recipe)
    records = [
        {"way": way, "recipes": ", ".join(names), **dict(items)} for (way, items), names in lines.items()
    ]
    columns = [
        Column("way", "way"),
        Column("recipes", "recipes"),
        *(number(kind, kind, text.count) for kind in sorted(kinds)),
    ]
    caption = "Bytes a step that one rank gives to each collective, counted at the collective."
    return make_table(
        f"compatibility-sent-{machine.env_id}", columns, records, caption if records else "", sortable=False
    )


def compiled(machine: Machine) -> Table:
    """Losses of compiled ways beside those of the same way in eager mode, with their graphs and graph breaks."""
    newest, curves = _newest(machine), _losses(machine)
    records = [
        (way, recipe, resolved_of(record))
        for (way, recipe), record in newest.items()
        if way in EAGER and record["status"] == "ok" and "graphs" in resolved_of(record)
    ]
    columns = (
        Column("way", itemgetter(0)),
        Column("recipe", itemgetter(1)),
        Column("losses by step, compiled", lambda r: curves.get((r[0], r[1]), "")),
        Column("losses by step, eager", lambda r: curves.get((EAGER[r[0]], r[1]), "")),
        number("graphs", lambda r: r[2]["graphs"], text.count),
        number("graph breaks", lambda r: r[2]["graph_breaks"], text.count),
    )
    caption = (
        "Blocks with the same code share one graph. On a CPU the backend is `aot_eager`, on a GPU Inductor."
    )
    return make_table(f"compatibility-compiled-{machine.env_id}", columns, records, caption, sortable=False)


def _losses(machine: Machine) -> dict[tuple[str, str], str]:
    """(way, recipe) -> losses by step of its newest run."""
    frame = machine.frame
    own = frame[(frame["suite"] == SUITE) & (frame["metric"] == "loss") & (frame["status"] == "ok")]
    return {
        (str(text.axes_of(r["axes"])["cell"]), r["arm"]): ", ".join(f"{loss:.6f}" for loss in r["samples"])
        for r in sorted(rows_of(own), key=_when)
    }


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


def _listed(table: Table) -> Table:
    """The table of bytes with one column in place of one for each kind of collective, most of which are empty."""
    kinds = [column.title for column in table.columns[2:]]
    rows = []
    for way, recipes, *cells in table.rows:
        shown = (f"{kind} {cell.text}" for kind, cell in zip(kinds, cells, strict=True) if cell.text)
        rows.append((way, recipes, Cell("; ".join(shown))))
    return Table(table.key, (*table.columns[:2], Column("bytes")), tuple(rows), table.caption, sortable=False)


def page(machines: Sequence[Machine], *, details: bool = False) -> str:
    """`docs/compatibility.md`, or `docs/compatibility-details.md`.

    Raises:
        UsageError: no machine has run the suite.
    """
    from harness.report.markup import cell_markdown

    measured = [m for m in machines if SUITE in m.suites]
    if not measured:
        raise UsageError(f"no rows of suite {SUITE}: run python -m harness sweep=parallel first")
    command, name = ("--details ", "-details") if details else ("", "")
    lines = [
        "# Parallel training: compiled blocks and bytes sent"
        if details
        else "# What runs in parallel with what",
        "",
        f"Written from results: `python -m harness.report.compatibility {command}results/published > "
        f"docs/compatibility{name}.md`, after",
        "`python -m harness sweep=parallel`, which runs every cell. Do not edit: a test compares this page with the results.",
        "",
        *(
            ["[Which ways run with which recipes](compatibility.md) has the cells."]
            if details
            else [INTRO, "", DETAILS]
        ),
    ]
    for machine in measured:
        lines += ["", f"## {machine.name}", "", described(machine)]
        sections = (
            (("Compiled", compiled(machine)), ("On the wire", _listed(sent(machine))))
            if details
            else (("", matrix(machine)), ("Reasons", reasons(machine)))
        )
        for title, table in sections:
            if not table.rows:
                continue
            lines += [
                "",
                *([f"### {title}", ""] if title else []),
                *([table.caption, ""] if table.caption else []),
            ]
            lines.append("| " + " | ".join(c.title for c in table.columns) + " |")
            lines.append("|" + "|".join(" ---: " if c.numeric else " --- " for c in table.columns) + "|")
            lines += ["| " + " | ".join(cell_markdown(c) for c in row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def main(runs: Sequence[str]) -> int:
    """Prints the page of some runs; with `--details` the second page."""
    from harness.report.runs import load

    folders = [Path(run) for run in runs if run != "--details"] or [Path("results/published")]
    try:
        sys.stdout.write(page(load(folders, Path()).machines, details="--details" in runs))
    except UsageError as error:
        raw_output.say(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
