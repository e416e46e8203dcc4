"""`python -m harness watch RUN`: how far a sweep is, from any terminal that sees its folder. Imports no torch.

Read are the notes `_progress.json` that a run, or each of its shards, keeps (`harness.engine.runlog`). Nothing is asked of the
processes themselves, which may be on other machines. Of one on this machine it is checked that it still lives, by its
number and when it began. One elsewhere counts as running until its note says otherwise, since one that died there is as
silent as one that has a long case: how long it has been silent is what can be said.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.live import Live

from harness.machine import raw_output, terminal
from harness.machine.processes import began, this_host
from harness.store import find_run, run_files
from harness.store.errors import UsageError
from harness.store.outside import from_json, read_text
from harness.store.text import done, some
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

SILENT_S = 120.0  # without a sign of life it is said how long ago the last one was
LINE_S = 30.0  # between two lines where there is no terminal
ENDED = ("finished", "interrupted", "failed", "gone")


@dataclass(frozen=True, slots=True)
class Part:
    """A run, or one shard of it.

    Attributes:
        name: "0/4" of a shard, "" of a run that is whole.
        state: waiting, running, finished, interrupted, failed, or gone: its process ended without a word.
        total: cases and training runs that it measures.
        share: of them that is done.
        text: what it does, or how it ended.
        started: seconds since 1970, 0 where it has not.
        written: of its last sign of life.
        statuses: rows by status.
    """

    name: str
    state: str
    total: int = 0
    share: float = 0.0
    text: str = ""
    started: float = 0.0
    written: float = 0.0
    statuses: Mapping[str, int] = field(default_factory=dict)

    def left_s(self, now: float) -> float | None:
        """Seconds until the end at the present speed; None where that is unknown."""
        if self.state in ENDED:
            return 0.0
        if self.state != "running" or self.share <= 0:
            return None
        return max(0.0, self.started + (self.written - self.started) / self.share - now)


def look(folder: Path, asked: Callable[[int], int | None] = began) -> list[Part]:
    """Parts of a run: its shards in order, also those that have not started; else the run itself.

    A run that was resumed without shards has both, and the newer note stands for the run.

    Args:
        folder: of the run.
        asked: when a process of this host began, None where it is gone.
    """
    whole = _part("", folder, asked)
    shards: dict[int, dict[int, Part]] = {}  # by how many there are
    for path in folder.glob("shard-*-of-*"):
        if found := re.fullmatch(r"shard-(\d+)-of-(\d+)", path.name):
            name = f"{found[1]}/{found[2]}"
            shards.setdefault(int(found[2]), {})[int(found[1])] = _part(name, path, asked) or Part(
                name, "waiting"
            )

    def written(count: int) -> float:
        return max(part.written for part in shards[count].values())

    count = max(shards, key=written, default=0)  # spread again in another way: the latest counts
    if whole is not None and not (count and whole.written <= written(count)):
        return [whole]
    return [shards[count].get(i, Part(f"{i}/{count}", "waiting")) for i in range(count)]


def _part(name: str, folder: Path, asked: Callable[[int], int | None]) -> Part | None:
    try:
        note = from_json(read_text(folder / run_files.PROGRESS))
        state, here = str(note["state"]), note["host"] == this_host() != ""
        if state == "running" and here and asked(int(note["pid"])) != note["began"]:
            state = "gone"
        if not 0 <= (share := float(note["share"])) <= 1:
            return None
        return Part(
            name,
            state,
            int(note["total"]),
            share,
            str(note.get("message") or note.get("text", "")),
            float(note["started"]),
            float(note["written"]),
            {str(k): int(v) for k, v in note["statuses"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there yet, or not ours


def summary(parts: Sequence[Part], now: float) -> str:
    """One line about all parts: how much is done, how long it takes yet, how many rows of each status there are.

    Shards run side by side, so the time left is that of the slowest; where one can't say, it is a lower bound.
    """
    if not parts:
        return "nothing has started"
    known = [part.total for part in parts if part.state != "waiting"]
    usual = sum(known) / len(known) if known else 0.0
    totals = [usual if part.state == "waiting" else part.total for part in parts]
    sum_done = sum(total * part.share for total, part in zip(totals, parts, strict=True))
    states = Counter(part.state for part in parts)
    said = [
        f"{done(sum_done / sum(totals))} of {round(sum(totals))} done"
        if sum(totals)
        else "nothing to measure"
    ]
    if len(parts) > 1:
        said.append(f"{len(parts)} shards: " + ", ".join(f"{n} {state}" for state, n in states.items()))
    elif parts[0].state != "running":
        said.append(parts[0].state)
    left = [part.left_s(now) for part in parts]
    if not all(part.state in ENDED for part in parts):
        times = [seconds for seconds in left if seconds is not None]
        bound = "at least " if None in left else ""
        said.append(
            f"{bound}{duration(max(times))} left" if times and max(times) > 0 else "time left unknown"
        )
    silent = max((now - part.written for part in parts if part.state == "running"), default=0.0)
    if silent > SILENT_S:
        said.append(f"the longest silent for {duration(silent)}")
    rows = sum((Counter(part.statuses) for part in parts), Counter())
    if rows:
        said.append(", ".join(f"{rows[status]} {status}" for status in sorted(rows)))
    return "; ".join(said)


def _stated(folder: Path, parts: Sequence[Part], now: float) -> str:
    """The summary; of a run that has ended, files of rows whose footer cannot be read come before it."""
    if not all(part.state in ENDED for part in parts):
        return summary(parts, now)
    from harness.store.reading import read_parts

    bad = read_parts([folder], ())[1]
    said = f"{len(bad)} files of rows cannot be read ({some(bad)}), restore them from a copy; " if bad else ""
    return said + summary(parts, now)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725), duration(65.4), duration(7)
    ('1:02:05', '1:05', '0:07')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(folder: Path, parts: Sequence[Part], now: float) -> Table:
    """The parts as a table, the summary below it."""
    made = terminal.table(str(folder), "|shard", "|state", ">done", ">left", "now")
    for part in parts:
        left = part.left_s(now)
        ago = now - part.written
        silent = part.state == "running" and ago > SILENT_S
        text = f"last sign of life {duration(ago)} ago: {part.text}" if silent else part.text
        terminal.row(
            made,
            part.name or "whole",
            part.state,
            done(part.share),
            duration(left) if left and part.state == "running" else "",
            text,
        )
    made.caption = _stated(folder, parts, now)
    return made


@dataclass(frozen=True, slots=True)
class Words:
    """python -m harness watch: how far a running sweep is"""

    run: str = word("RUN", "run folder or run id")
    results_dir: str = key("where run ids are looked up", "results")
    once: bool = key("show it once", False)
    every: float = key("seconds between two looks (1)", 1.0, span=(0.1, 3600))


def main(argv: Sequence[str]) -> int:
    """Shows a run until it has ended; exit code 0, also where it ended badly: that is the run's own."""
    if (options := options_of(Words, argv)) is None:
        return 0
    folder = find_run(options.run, options.results_dir)
    if not look(folder):
        raise UsageError(
            f"{folder} holds no {run_files.PROGRESS}: no sweep of this harness has started in it"
        )
    follow(folder, options.every, once=options.once)
    return 0


def follow(folder: Path, every_s: float, once: bool = False) -> None:
    """Shows a run until all of its parts have ended, or once."""
    console, parts, last = terminal.console(), look(folder), 0.0
    if once:
        console.print(table(folder, parts, time.time()))
        return
    live = Live(table(folder, parts, time.time()), console=console, auto_refresh=False)
    with live if console.is_terminal else nullcontext():
        while True:
            parts, now = look(folder), time.time()
            ended = all(part.state in ENDED for part in parts)
            if console.is_terminal:
                live.update(table(folder, parts, now), refresh=True)
            elif ended or now - last >= LINE_S:
                sys.stdout.write(f"{_stated(folder, parts, now)}\n")
                sys.stdout.flush()
                last = now
            if ended or raw_output.reader_left():
                return
            time.sleep(every_s)
