"""`python -m harness fleet RUN...`: the runs of many machines together. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness import store
from harness.judge.fleet import link_tables
from harness.judge.fleet import links as fleet_links
from harness.judge.fleet.cards import cards, groups
from harness.judge.fleet.judge import Group, Spread, judge
from harness.judge.fleet.link_rule import TOLERANCE
from harness.judge.fleet.links import Links
from harness.machine import raw_output, terminal
from harness.machine.links import SUITE as LINKS
from harness.store import run_state
from harness.store.errors import UsageError
from harness.store.text import markdown, percent, plural, ratio, some
from harness.store.words import helped, keyed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

USAGE = """\
usage: python -m harness fleet RUN... [tolerance=5] [link_tolerance=25] [json=true] [markdown=true] [results_dir=DIR]
compares cards of one model: spread, outliers, the slowest card, corrupt results; and links of one kind (docs/fleet-links.md)
RUN  a folder of a run or of runs, or a run id
tolerance, link_tolerance  percent by which healthy cards, and links, may differ
exit 0 no outlier; 1 an outlier; 2 the request could not be carried out, a file or a row of links could not be read, or an
     operation of links failed
"""
KEYS = ("tolerance", "link_tolerance", "json", "markdown", "results_dir")
# A table: its title, the names of its columns and its rows
_Table = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]
NO_LINKS = Links()


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: no run, an unknown word, a tolerance that is none, or runs without a row.
    """
    if helped(words, USAGE):
        return 0
    runs, options = keyed(words, USAGE, KEYS)
    if not runs:
        raise UsageError("fleet takes runs: folders of runs, or run ids")
    tolerance = _tolerance("tolerance", options.get("tolerance", "5"))
    of_links = _tolerance("link_tolerance", options.get("link_tolerance", f"{100 * TOLERANCE:g}"))
    folders = [store.find_run(run, options.get("results_dir", "results")) for run in runs]
    frame, _ = store.read_quietly(folders, all_attempts=True)
    for problem in frame.attrs["problems"]:
        raw_output.say(f"warning: {terminal.printable(problem)}\n")
    if not len(frame):
        raise UsageError(f"no rows in {', '.join(runs)}")
    unread = tuple(frame.attrs["problems"])
    links = fleet_links.judge(frame, run_state.states(frame.attrs["files"]), of_links, unread)
    found = [judge(group, tolerance) for group in groups(cards(frame[frame["suite"] != LINKS]))]
    if options.get("json") == "true":
        said = as_dict(found, unread) | {"links": link_tables.as_dict(links)}
        sys.stdout.write(json.dumps(said, indent=1) + "\n")
    elif options.get("markdown") == "true":
        sys.stdout.write("\n".join(as_markdown(found, unread, links)) + "\n")
    else:
        _show(found, unread, links)
    if links.outliers or any(group.outliers for group in found):
        return 1
    return 2 if unread or links.failed else 0


def _tolerance(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise UsageError(f"{name}={terminal.printable(text)}: expected percent between 0 and 100")
    return value / 100


def as_dict(found: Sequence[Group], unread: Sequence[str] = ()) -> dict[str, Any]:
    """Plain values; `unread`: files that could not be read, and why."""
    return {
        "unread": list(unread),
        "outliers": [asdict(outlier) for group in found for outlier in group.outliers],
        "groups": [
            {
                "model": group.model,
                "cards": [card.name for card in group.cards],
                "not_judged": group.why_not,
                "spreads": [asdict(spread) for spread in group.spreads],
                "differences": group.differences,
                "checksums_compared": group.checked,
                "judged_by_times": sorted(group.timed),
                "judged_by_results": sorted(group.compared),
                "lacking": {name: list(arms) for name, arms in group.lacking.items()},
            }
            for group in found
        ],
    }


def as_markdown(found: Sequence[Group], unread: Sequence[str] = (), links: Links = NO_LINKS) -> Iterator[str]:
    """The same as the terminal shows, for a pull request or a page."""
    for group in found:
        yield from (f"## {markdown(_head(group))}", "")
        for line in _lines(group):
            yield from (markdown(line), "")
        yield from _as_markdown(_tables(group))
    if links.asked:
        yield from ("## Links", "")
        for line in link_tables.lines(links):
            yield from (markdown(line), "")
        yield from _as_markdown(link_tables.tables(links))
        yield from (markdown(link_tables.verdict(links)), "")
    if found or not links.asked:
        yield _verdict(found, unread)


def _as_markdown(tables: Iterator[_Table]) -> Iterator[str]:
    for title, columns, rows in tables:
        yield from (f"**{title}**", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
        yield from (f"| {' | '.join(map(markdown, row))} |" for row in rows)
        yield ""


def _show(found: Sequence[Group], unread: Sequence[str], links: Links) -> None:
    where = terminal.console()
    for group in found:
        terminal.say(where, _head(group), "bold")
        for line in _lines(group):
            terminal.say(where, line)
        _print(where, _tables(group))
    if links.asked:
        terminal.say(where, "Links", "bold")
        for line in link_tables.lines(links):
            terminal.say(where, line)
        _print(where, link_tables.tables(links))
        terminal.say(where, link_tables.verdict(links), "bold red" if links.outliers else "bold")
    if found or not links.asked:
        verdict = _verdict(found, unread)
        terminal.say(where, verdict, "bold red" if any(g.outliers for g in found) else "bold")


def _print(where: Console, tables: Iterator[_Table]) -> None:
    for title, columns, rows in tables:
        made = terminal.table(title, *columns)
        for cells in rows:
            terminal.row(made, *cells)
        where.print(made)


def _head(group: Group) -> str:
    env = group.cards[0].env
    code = env.get("code") or f"commit {str(env.get('git_commit') or 'unknown')[:7]}"
    return f"{group.model}: {plural(len(group.cards), 'card')}, torch {env.get('torch')}, code {code}"


def _lines(group: Group) -> Iterator[str]:
    if group.model.startswith("CPU"):
        yield "Measured on CPUs: this compares machines and is no evidence about a GPU."
    if group.why_not:
        yield f"Times are not judged: {group.why_not}."
    wrong = sum(outlier.kind == "corrupt" for outlier in group.outliers)
    if group.checked or wrong:
        verdict = "all cards gave the same bits" if not wrong else f"{plural(wrong, 'card')} computed wrongly"
        yield f"{plural(group.checked, 'result')} compared bit by bit: {verdict}."
    elif len(group.cards) > 1:
        yield "No checksum of a product was measured on two of them (sweep=fleet does)."


def _tables(group: Group) -> Iterator[_Table]:
    if group.outliers:
        yield (
            "Out of line",
            ("card", "suite", "regime", "what", "why"),
            [(o.card, o.suite, o.regime, o.kind, o.reason) for o in group.outliers],
        )
    if group.spreads:
        yield (
            "Time over that of the middle card; speedup of the middle card, and of the card where it is smallest",
            (
                "suite",
                "regime",
                "arm",
                ">cards",
                ">cases",
                ">fastest",
                ">slowest",
                "slowest card",
                ">speedup",
                ">at least",
            ),
            [_spread_cells(spread) for spread in group.spreads],
        )
    if group.differences:
        yield (
            "Differences between these cards",
            ("field", "value", "cards"),
            [
                (name, value, f"{len(names)}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
                for name, values in group.differences.items()
                for value, names in values.items()
            ],
        )


def _spread_cells(s: Spread) -> tuple[str, ...]:
    shares = percent(s.low), percent(s.high)
    return (
        s.suite,
        s.regime,
        s.arm,
        f"{s.cards}",
        f"{s.cases}",
        *shares,
        s.slowest,
        ratio(s.speedup),
        ratio(s.slowest_speedup),
    )


def _verdict(found: Sequence[Group], unread: Sequence[str] = ()) -> str:
    every = {card.name for group in found for card in group.cards}
    out = {outlier.card for group in found for outlier in group.outliers}
    timed = {name for group in found for name in group.timed}
    compared = {name for group in found for name in group.compared}
    if out:
        return f"{plural(len(out), 'card')} of {len(every)} out of line: {', '.join(sorted(out))}"
    if not timed | compared | {name for group in found for name in group.lacking}:
        return f"can't tell: none of {plural(len(every), 'card')} could be judged"
    partly = {name: arms for group in found for name, arms in group.lacking.items()}
    unknown = sorted(every - timed - partly.keys()) if timed else []
    missing = f"; not by times: {some(unknown)}" if unknown else ""
    if partly:
        missing += f"; not by all times: {some([f'{name} (no {some(arms)})' for name, arms in sorted(partly.items())])}"
    judged = f"judged by times {len(timed)} of {len(every)}, by results {len(compared)}{missing}"
    if unread:
        return f"can't tell: {plural(len(unread), 'file')} could not be read, named above; of the others none is out of line, {judged}"
    return f"no card out of line; {judged}"
