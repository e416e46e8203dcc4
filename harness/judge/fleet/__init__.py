"""`python -m harness fleet RUN...`: the runs of many machines together. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.judge.fleet.judge import CardGroup, Outlier, judge
from harness.machine import raw_output, terminal
from harness.store import printer
from harness.store.errors import UsageError
from harness.store.printer import Table, Tone, picked
from harness.store.private import hashed, of_run, salt_file
from harness.store.text import percent, plural, ratio, some
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_SPREAD = "suite regime arm cards cases low high slowest speedup slowest_speedup"
_SPREADS = (
    *["suite", "regime", "arm", ">cards", ">cases", ">fastest", ">slowest"],
    "slowest card",
    ">speedup",
    ">at least",
)
_GROUP = "model software cards not_judged differences checksums_compared judged_by_times judged_by_results levels lacking"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """python -m harness fleet: compares cards of one model: spread, outliers, the slowest card, corrupt results
    exit 0 no outlier; 1 an outlier, or a card is missing; 2 the request could not be carried out, or a file could not be read
    """

    runs: list[str] = word("RUN", "a folder of a run or of runs, or a run id")
    tolerance: float = key("percent by which healthy cards may differ (5)", 5.0, span=(1e-9, 99.999999999))
    expect: str = key("cards that there must be: their number, or names of cards and hosts: a,b,c", "")
    json: bool = key("as plain values", False)
    markdown: bool = key("for a pull request or a page", False)
    results_dir: str = key("where run ids are looked up", "results")


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is found among cards.

    Attributes:
        groups: of alike cards.
        unread: files that could not be read, and why.
        missing: cards that were expected and have no row.
    """

    groups: Sequence[CardGroup]
    unread: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def outliers(self) -> list[Outlier]:
        """Outliers of all groups."""
        return [outlier for group in self.groups for outlier in group.outliers]

    @property
    def code(self) -> str:
        """out, missing, not_judged, unread, alike (of no card it is known how fast it should be) or in_line."""
        if self.outliers:
            return "out"
        if self.missing:
            return "missing"
        if not any(g.judged_by_times or g.judged_by_results or g.lacking for g in self.groups):
            return "not_judged"
        return "unread" if self.unread else "in_line" if any(g.levels for g in self.groups) else "alike"

    @property
    def tone(self) -> Tone:
        """Good where every judged card is in line, bad where one is out of it or missing."""
        tones: dict[str, Tone] = {"in_line": "good", "alike": "good", "out": "bad", "missing": "bad"}
        return tones.get(self.code, "")

    def lines(self) -> list[str]:
        """What was found and who was judged by what, in one line; then each group."""
        every = {card for group in self.groups for card in group.cards}
        timed = {card for group in self.groups for card in group.judged_by_times}
        compared = {card for group in self.groups for card in group.judged_by_results}
        partly = {card: arms for group in self.groups for card, arms in group.lacking.items()}
        out = {outlier.card for outlier in self.outliers}
        outcome = {
            "out": f"{len(out)} of {plural(len(every), 'card')} out of line, or slow for its model: {some(sorted(out))}",
            "missing": "no card that was measured is out of line",
            "not_judged": f"can't tell: none of {plural(len(every), 'card')} could be judged",
            "unread": f"can't tell: {plural(len(self.unread), 'file')} could not be read; of the others none is out of line",
            "alike": "the judged cards are alike",
            "in_line": "no card out of line",
        }[self.code]
        parts = [outcome, *([f"missing: {some(list(self.missing))}"] if self.missing else [])]
        if self.code == "missing":
            parts.reverse()
        if self.code != "not_judged":
            parts.append(f"judged by times {len(timed)} of {len(every)}, by results {len(compared)}")
        if timed and (unknown := sorted(every - timed - partly.keys())):
            parts.append(f"not by times: {some(unknown)}")
        if partly:
            arms = [f"{card} (no {some(names)})" for card, names in sorted(partly.items())]
            parts.append(f"not by all times: {some(arms)}")
        return ["; ".join(parts), *(line for group in self.groups for line in _about(group))]

    def tables(self) -> list[Table]:
        """Who is out of line in each group, how far its cards lie apart, and what differs between them."""
        return [table for group in self.groups for table in _tables(group)]

    def data(self) -> dict[str, Any]:
        """Plain values."""
        outlier = "card suite regime kind off reason"
        groups = [
            picked(group, _GROUP)
            | {
                "spreads": [picked(each, _SPREAD) for each in group.spreads],
                "outliers": [picked(each, outlier) for each in group.outliers],
            }
            for group in self.groups
        ]
        outliers = [picked(each, outlier) for each in self.outliers]
        return {
            "code": self.code,
            "unread": self.unread,
            "outliers": outliers,
            "groups": groups,
            "missing": self.missing,
        }


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: no run, an unknown word, a tolerance that is none, or runs without a row.
    """
    if (options := options_of(FleetOptions, argv)) is None:
        return 0
    folders = [store.find_run(run, options.results_dir) for run in options.runs]
    frame = store.open_run(folders, all_attempts=True)
    unread = frame.attrs["problems"]
    for problem in unread:
        raw_output.notify(f"warning: {problem}\n")
    if not len(frame):
        raise UsageError(f"no rows in {', '.join(options.runs)}")
    groups = judge(frame, options.tolerance / 100)
    runs = {store.run_folder(Path(file)) for file in frame.attrs["files"]}
    missing = _missing({card for group in groups for card in group.cards}, options.expect, runs)
    found = Fleet(groups, unread, missing)
    if options.markdown and not options.json:
        sys.stdout.write(printer.as_markdown(found))
    else:
        printer.show(found, terminal.console(), as_program=options.json)
    return 1 if found.outliers or missing else 2 if unread else 0


def _missing(cards: Collection[str], expect: str, runs: Collection[Path]) -> list[str]:
    """Cards that were expected and have no row, by name where names were given; rows hold the hash of a host's, by a salt."""
    known = {name for card in cards for name in (card, *card.replace("host ", "@").split("@"))}
    if expect.isdigit() and expect not in known:  # a hash may be of digits alone
        lack = int(expect) - len(cards)
        return [f"{plural(lack, 'card')} of {expect}"] if lack > 0 else []
    named = filter(None, (name.strip() for name in expect.split(",")))
    salted = [run for run in runs if salt_file(run.parent.parent).exists()]

    def names(name: str) -> set[str]:
        host = {"host_hash": hashed(name)}
        return {name, *(env["host_hash"][:8] for env in (host, *(of_run(host, run) for run in salted)))}

    return [name for name in named if not known & names(name)]


def _about(group: CardGroup) -> Iterator[str]:
    yield f"{group.model}: {plural(len(group.cards), 'card')}, {group.software}"
    if group.model.startswith("CPU"):
        yield "Measured on CPUs: this compares machines and is no evidence about a GPU."
    if group.not_judged:
        yield f"Times are not judged: {group.not_judged}."
    wrong = len([each for each in group.outliers if each.kind == "corrupt"])
    if group.checksums_compared or wrong:
        verdict = f"{plural(wrong, 'card')} computed wrongly" if wrong else "the same bits"
        compared = plural(group.checksums_compared, "result")
        yield f"{compared} compared bit by bit on {plural(len(group.judged_by_results), 'card')}: {verdict}."
    elif len(group.cards) > 1:
        yield "No checksum of a product was measured on two of them (sweep=fleet does)."


def _tables(group: CardGroup) -> Iterator[Table]:
    outliers = [(o.card, o.suite, o.regime, o.kind, o.reason) for o in group.outliers]
    spreads = [
        (
            *(s.suite, s.regime, s.arm, str(s.cards), str(s.cases), percent(s.low), percent(s.high)),
            *(s.slowest, ratio(s.speedup), ratio(s.slowest_speedup)),
        )
        for s in group.spreads
    ]
    differ = [
        (name, value, f"{len(cards)}: {some(cards)}")
        for name, values in group.differences.items()
        for value, cards in values.items()
    ]
    spread = (
        "Time over that of the middle card; speedup of the middle card, and of the card where it is smallest"
    )
    yield printer.table("Out of line", ("card", "suite", "regime", "what", "why"), outliers)
    yield printer.table(spread, _SPREADS, spreads)
    yield printer.table("Differences between these cards", ("field", "value", "cards"), differ)
