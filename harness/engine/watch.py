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
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.live import Live

from harness.machine import raw_output, terminal
from harness.machine.processes import began, this_host
from harness.store import find_run, run_files
from harness.store.errors import UsageError
from harness.store.text import done, some
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

SILENT_S = 120.0  # without a sign of life it is said how long ago the last one was
LINE_S = 30.0  # between two lines where there is no terminal
LONGEST_S = 1e12  # a note may say any number
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
    whole, shards = _part("", folder, asked), dict[int, dict[int, Part]]()  # by how many there are
    for path in folder.glob("shard-*-of-*"):
        if found := re.fullmatch(r"shard-(\d+)-of-(\d+)", path.name):
            index, count = map(int, found.groups())
            part = _part(f"{index}/{count}", path, asked)
            shards.setdefault(count, {})[index] = part or Part(f"{index}/{count}", "waiting")
    written = {n: max(part.written for part in parts.values()) for n, parts in shards.items()}
    count = max(written, key=written.__getitem__, default=0)  # spread again in another way: the latest counts
    if whole is not None and whole.written > written.get(count, -1.0):
        return [whole]
    return [shards[count].get(i, Part(f"{i}/{count}", "waiting")) for i in range(count)]


def _part(name: str, folder: Path, asked: Callable[[int], int | None]) -> Part | None:
    try:
        note = run_files.read_object(folder / run_files.PROGRESS)
        state, here = str(note["state"]), note["host"] == this_host() != ""
        if state == "running" and here and asked(int(note["pid"])) != note["began"]:
            state = "gone"
        share, text = float(note["share"]), str(note.get("message") or note.get("text", ""))
        times = float(note["started"]), float(note["written"])
        statuses = {str(k): int(v) for k, v in note["statuses"].items()}
        return (
            Part(name, state, int(note["total"]), share, text, *times, statuses) if 0 <= share <= 1 else None
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None  # not there yet, or not ours


def summary(parts: Sequence[Part], now: float) -> str:
    """One line about all parts: how much is done, how long it takes yet, how many rows of each status there are.

    Shards run side by side, so the time left is that of the slowest; where one can't say, it is a lower bound.
    """
    if not parts:
        return "nothing has started"
    states = Counter(part.state for part in parts)
    known = [part.total for part in parts if part.state != "waiting"]
    total = sum(known) + states["waiting"] * (sum(known) / len(known) if known else 0.0)
    share = sum(part.total * part.share for part in parts) / total if total else 0.0
    said = [f"{done(share)} of {round(total)} done" if total else "nothing to measure"]
    if len(parts) > 1:
        said.append(f"{len(parts)} shards: " + ", ".join(f"{n} {state}" for state, n in states.items()))
    elif parts[0].state != "running":
        said.append(parts[0].state)
    if states.keys() - {*ENDED}:
        left = [part.left_s(now) for part in parts]
        longest = max(filter(None, left), default=0.0)
        bound = "at least " if None in left else ""
        said.append(f"{bound}{duration(longest)} left" if longest else "time left unknown")
    silent = max((now - part.written for part in parts if part.state == "running"), default=0.0)
    if silent > SILENT_S:
        said.append(f"the longest silent for {duration(silent)}")
    rows = sum((Counter(part.statuses) for part in parts), Counter())
    if rows:
        said.append(", ".join(f"{rows[status]} {status}" for status in sorted(rows)))
    return "; ".join(said)


def _stated(folder: Path, parts: Sequence[Part], now: float) -> str:
    """The summary; of a run that has ended, files of rows whose footer cannot be read come before it."""
    from harness.store.reading import read_parts

    has_ended = all(part.state in ENDED for part in parts)
    bad = read_parts([folder], ())[1] if has_ended else []
    said = f"{len(bad)} files of rows cannot be read ({some(bad)}), restore them from a copy; " if bad else ""
    return said + summary(parts, now)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725), duration(65.4)
    ('1:02:05', '0:01:05')
    """
    return str(timedelta(seconds=round(max(-LONGEST_S, min(seconds, LONGEST_S)))))


def table(folder: Path, parts: Sequence[Part], now: float) -> Table:
    """The parts as a table, the summary below it."""
    made = terminal.table(str(folder), "|shard", "|state", ">done", ">left", "now")
    for part in parts:
        left, ago, runs = part.left_s(now), now - part.written, part.state == "running"
        silent = f"last sign of life {duration(ago)} ago: " if runs and ago > SILENT_S else ""
        terminal.row(
            made,
            part.name or "whole",
            part.state,
            done(part.share),
            duration(left) if left and runs else "",
            silent + part.text,
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
    console, last = terminal.console(), 0.0
    live = Live(console=console, auto_refresh=False)
    with live if console.is_terminal and not options.once else nullcontext():
        while True:
            parts, now = look(folder), time.time()
            ended = all(part.state in ENDED for part in parts)
            if options.once:
                console.print(table(folder, parts, now))
            elif console.is_terminal:
                live.update(table(folder, parts, now), refresh=True)
            elif ended or now - last >= LINE_S:
                sys.stdout.write(f"{_stated(folder, parts, now)}\n")
                sys.stdout.flush()
                last = now
            if options.once or ended or raw_output.reader_left():
                return 0
            time.sleep(options.every)
