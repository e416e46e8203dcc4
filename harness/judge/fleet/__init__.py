"""`python -m harness fleet RUN...`: the runs of many machines together. Imports no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import store
from harness.judge import print_tables, words
from harness.judge.fleet.judge import Group, judge
from harness.machine import raw_output, terminal
from harness.store.errors import UsageError
from harness.store.private import hashed, of_run, salt_file
from harness.store.text import percent, plural, ratio, some
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_OUTLIERS = "card", "suite", "regime", "what", "why"
_SPREADS = (
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
)
_DIFFERENCES = "field", "value", "cards"


@dataclass(frozen=True, slots=True)
class Words:
    """python -m harness fleet: compares cards of one model: spread, outliers, the slowest card, corrupt results
    exit 0 no outlier; 1 an outlier, or a card is missing; 2 the request could not be carried out, or a file could not be read
    """

    runs: list[str] = word("RUN", "a folder of a run or of runs, or a run id")
    tolerance: float = key("percent by which healthy cards may differ (5)", 5.0, span=(1e-9, 99.999999999))
    expect: str = key("cards that there must be: their number, or names of cards and hosts: a,b,c", "")
    json: bool = key("as plain values", False)
    markdown: bool = key("for a pull request or a page", False)
    results_dir: str = key("where run ids are looked up", "results")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: no run, an unknown word, a tolerance that is none, or runs without a row.
    """
    if (options := options_of(Words, argv)) is None:
        return 0
    folders = [store.find_run(run, options.results_dir) for run in options.runs]
    frame = store.open_run(folders, all_attempts=True)
    unread = frame.attrs["problems"]
    for problem in unread:
        raw_output.say(f"warning: {problem}\n")
    if not len(frame):
        raise UsageError(f"no rows in {', '.join(options.runs)}")
    found = judge(frame, options.tolerance / 100)
    runs = {store.run_folder(Path(file)) for file in frame.attrs["files"]}
    missing = _missing({card for group in found for card in group.cards}, options.expect, runs)
    is_out = bool(missing) or any(group.outliers for group in found)
    if options.json:
        said = as_dict(found, unread) | {"missing": missing}
        sys.stdout.write(json.dumps(said, indent=1) + "\n")
    elif options.markdown:
        pages = [(_lines(group), list(_tables(group))) for group in found]
        sys.stdout.write(str(words().fleet_page(pages, _verdict(found, unread, missing))))
    else:
        _show(found, unread, missing, "bold red" if is_out else "bold")
    return 1 if is_out else 2 if unread else 0


def as_dict(found: Sequence[Group], unread: Sequence[str]) -> dict[str, Any]:
    """Plain values; `unread`: files that could not be read, and why."""
    groups = [asdict(group) for group in found]
    outliers = [outlier for group in groups for outlier in group["outliers"]]
    return {"unread": list(unread), "outliers": outliers, "groups": groups}


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


def _show(found: Sequence[Group], unread: Sequence[str], missing: Sequence[str], style: str) -> None:
    where = terminal.console()
    for group in found:
        for i, line in enumerate(_lines(group)):
            terminal.say(where, line, "" if i else "bold")
        print_tables(where, _tables(group))
    terminal.say(where, _verdict(found, unread, missing), style)


def _lines(group: Group) -> list[str]:
    """Its title, then what is said of it."""
    return str(words().fleet_lines(group)).splitlines()


def _tables(group: Group) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, names of the columns and rows of each table that has any."""
    outliers = [[o.card, o.suite, o.regime, o.kind, o.reason] for o in group.outliers]
    spreads = [
        [
            *(s.suite, s.regime, s.arm, str(s.cards), str(s.cases), percent(s.low), percent(s.high)),
            *(s.slowest, ratio(s.speedup), ratio(s.slowest_speedup)),
        ]
        for s in group.spreads
    ]
    differ = [
        [name, value, f"{len(cards)}: {some(cards)}"]
        for name, values in group.differences.items()
        for value, cards in values.items()
    ]
    spread = (
        "Time over that of the middle card; speedup of the middle card, and of the card where it is smallest"
    )
    yield "Out of line", _OUTLIERS, outliers
    yield spread, _SPREADS, spreads
    yield "Differences between these cards", _DIFFERENCES, differ


def _verdict(found: Sequence[Group], unread: Sequence[str], missing: Sequence[str]) -> str:
    outliers = [outlier for group in found for outlier in group.outliers]
    said = words().fleet_verdict(
        every={card for group in found for card in group.cards},
        out={outlier.card for outlier in outliers if outlier.kind != "low"},
        low={outlier.card for outlier in outliers if outlier.kind == "low"},
        missing=missing,
        timed={card for group in found for card in group.judged_by_times},
        compared={card for group in found for card in group.judged_by_results},
        partly={card: arms for group in found for card, arms in group.lacking.items()},
        unread=unread,
        leveled=any(group.levels for group in found),
    )
    return str(said)
