"""Compatibility: which ways of training in parallel run with which recipes, as rows of the suite `parallel` say.

    python -m harness.report.compatibility RUN... > docs/compatibility.md
    python -m harness.report.compatibility --details RUN... > docs/compatibility-details.md

Nothing here is asserted: a cell without a row is empty. Where several runs have the same cell, the newest one counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.machine import raw_output
from harness.report.facts import described
from harness.report.table import Cell, Column, Record, Table, known, resolved_of
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
    columns = (Column("way"), Column("ranks", numeric=True), *(Column(recipe) for recipe in recipes))
    rows = []
    for way in ways:
        own = [resolved_of(found[way, recipe]) for recipe in recipes if (way, recipe) in found]
        doc = next((str(r["doc"]) for r in own if "doc" in r), "")
        world = next((r["world"] for r in own if known(r.get("world"))), None)
        cells = (_cell(found.get((way, recipe))) for recipe in recipes)
        rows.append((Cell(way, note=doc), Cell(text.count(world) if world else "", world), *cells))
    return Table(f"compatibility-{machine.env_id}", columns, tuple(rows), sortable=False)


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
            style = _STYLES.get(what, "")
            rows.append((Cell(what, what, style), Cell(", ".join(of)), Cell(recipes_of), Cell(reason)))
    titles = ("what", "ways", "recipes", "reason")
    return Table(f"compatibility-reasons-{machine.env_id}", tuple(Column(t) for t in titles), tuple(rows))


def _notes(record: Record) -> list[tuple[str, str]]:
    """What is to be said of a cell beside that it runs."""
    if record["status"] != "ok":
        return [(_word(record), text.reason(str(record["reason"])).removeprefix(REFUSES))]
    found = []
    for key, what in _OTHERWISE.items():
        value = resolved_of(record).get(key)
        given = value if isinstance(value, list) else [value]
        found += [(f"runs, {what}", str(note)) for note in given if note and note != "fp8"]
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
    columns = (Column("way"), Column("recipes"), *(Column(kind, numeric=True) for kind in sorted(kinds)))
    rows = []
    for (way, items), names in lines.items():
        own = dict(items)
        cells = (Cell(text.count(own[k]) if k in own else "", own.get(k)) for k in sorted(kinds))
        rows.append((Cell(way, way), Cell(", ".join(names)), *cells))
    caption = "Bytes a step that one rank gives to each collective, counted at the collective."
    return Table(
        f"compatibility-sent-{machine.env_id}", columns, tuple(rows), caption if rows else "", sortable=False
    )


def compiled(machine: Machine) -> Table:
    """Losses of compiled ways beside those of the same way in eager mode, with their graphs and graph breaks."""
    newest, curves = _newest(machine), _losses(machine)
    rows = []
    for (way, recipe), record in newest.items():
        resolved = resolved_of(record)
        if record["status"] != "ok" or "graphs" not in resolved:
            continue
        if way not in EAGER:
            continue
        eager = (EAGER[way], recipe)
        losses = [curves.get(key, "") for key in ((way, recipe), eager)]
        counts = [resolved["graphs"], resolved["graph_breaks"]]
        rows.append(
            (
                Cell(way),
                Cell(recipe),
                *(Cell(x, x) for x in losses),
                *(Cell(text.count(n), n) for n in counts),
            )
        )
    titles = ("way", "recipe", "losses by step, compiled", "losses by step, eager")
    columns = (*map(Column, titles), Column("graphs", numeric=True), Column("graph breaks", numeric=True))
    caption = (
        "Blocks with the same code share one graph. On a CPU the backend is `aot_eager`, on a GPU Inductor."
    )
    return Table(f"compatibility-compiled-{machine.env_id}", columns, tuple(rows), caption, sortable=False)


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
