"""What a run tells those who wait for it: `_run.log` in its folder, and `_progress.json`, which `runs` reads.

Both are for people. Neither is read to decide anything, and a disk that refuses them costs no row: the store says so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from harness.machine import raw_output
from harness.machine.processes import began, this_host
from harness.machine.terminal import printable
from harness.store import RunWriter, run_files
from harness.store.errors import one_line
from harness.store.private import public
from harness.store.text import done, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from harness.engine.stages import Frame
    from harness.store.measurement import Measurement

EVERY_S = 1.0  # between two notes of steps; a unit that begins is noted at once
SILENT_S = 120.0  # without a sign of life it is said how long ago the last one was
GONE = "gone"  # of a process of this host that ended without a word

_log = logging.getLogger("harness.cli.run")


class LoggingWriter(RunWriter):
    """A writer that logs what it stored and counts it by status."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self.statuses: Counter[str] = Counter()

    def append(
        self, measurements: Iterable[Measurement], env: tuple[str, Mapping[str, object]] | None = None
    ) -> list[Measurement]:
        """Append rows like `RunWriter.append`; report them once they are durable."""
        rows = super().append(measurements, env)
        self.statuses.update(row.status for row in rows)
        for row in rows:
            about = f"{row.case_id} {row.suite} {row.arm} {row.metric}"
            if row.status == "failed":
                _log.error("%s failed: %s", about, row.reason)
            elif row.status == "skipped":
                _log.warning("%s skipped: %s", about, row.reason)
            else:
                _log.debug("%s = %s", about, row.value)
        return rows


class ProgressFile:
    """Keeps `_progress.json` of a run or shard up to date; a `show` of `harness.engine.progress.Progress`.

    Args:
        writer: of the rows, whose folder the note lies in.
    """

    def __init__(self, writer: LoggingWriter) -> None:
        self._writer = writer
        self._started, self._last = time.time(), 0.0
        self._state: dict[str, object] = {}

    def __call__(self, frame: Frame, begins: bool) -> None:
        _log.log(logging.INFO if begins else logging.DEBUG, "%s", frame.text)
        self._state |= {"text": frame.text, "share": frame.share}
        if begins or time.time() - self._last >= EVERY_S:
            self.write()

    def write(self, **more: object) -> None:
        """Writes the note, with what is new in it."""
        self._last = time.time()
        self._state |= more
        about = {
            "pid": os.getpid(),
            "began": began(os.getpid()),
            "host": this_host(),
            "started": self._started,
            "written": self._last,
            "statuses": dict(self._writer.statuses),
        }
        with suppress(OSError), run_files.written(self._writer.folder / run_files.PROGRESS) as file:
            file.write(json.dumps(public(about | self._state)).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """What a run or one shard of it last said: `share` of `total` cases is done; `written` in seconds since 1970."""

    state: str
    total: int
    share: float
    text: str
    written: float


def notes(folder: Path, asked: Callable[[int], int | None] = began) -> list[ProgressNote]:
    """What a run said last; of one that is spread, what the shards of its latest spread said.

    Nothing is asked of the processes, which may be on other machines, but of one on this machine whether it lives.

    Args:
        folder: of the run.
        asked: when a process of this host began, None where it is gone.
    """
    spreads: dict[int, list[ProgressNote]] = {}
    for path, count in ({folder: 0} | run_files.shards(folder)).items():
        if (note := _note(path / run_files.PROGRESS, asked)) is not None:
            spreads.setdefault(count, []).append(note)
    return max(spreads.values(), key=lambda every: max(note.written for note in every), default=[])


def _note(file: Path, asked: Callable[[int], int | None]) -> ProgressNote | None:
    try:
        record = run_files.read_object(file)
        state, here = str(record["state"]), record["host"] == this_host() != ""
        if state == "running" and here and asked(int(record["pid"])) != record["began"]:
            state = GONE
        share, text = float(record["share"]), str(record.get("message") or record.get("text", ""))
        return (
            ProgressNote(state, int(record["total"]), share, text, float(record["written"]))
            if 0 <= share <= 1
            else None
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None  # not there yet, or not ours


def progress(every: Iterable[ProgressNote], now: float) -> str:
    """How far a run is, in words; "" where none of its processes runs, or should."""
    every = list(every)
    if any(note.state == GONE for note in every):
        return f"{GONE}: its process ended without a word"
    if not (running := [note for note in every if note.state == "running"]):
        return ""
    total = sum(note.total for note in every)
    share = sum(note.total * note.share for note in every) / total if total else 0.0
    silent = max(now - note.written for note in running)
    parts = [f"running, {done(share)} of {total} done" if total else "running", running[-1].text]
    parts += [f"last sign of life {duration(silent)} ago"] if silent > SILENT_S else []
    return "; ".join(filter(None, parts))


class RawOutput:
    """Logs what libraries print by themselves, a warning a line, with what was under way.

    Lines of this process are read when something else begins (`at`), those of workers as they come (`printed`).
    """

    def __init__(self) -> None:
        self._where = ""

    @classmethod
    @contextmanager
    def logged(cls) -> Iterator[RawOutput]:
        """What this process prints until the end of the block, and what it has printed before."""
        own = cls()
        try:
            own.at("")
            yield own
        finally:
            own.at("")

    def at(self, where: str) -> None:
        """Log what was printed so far; `where` is under way from now on."""
        self.printed(self._where, raw_output.lines())
        self._where = where

    @staticmethod
    def printed(where: str, lines: Iterable[str]) -> None:
        """Log lines; "" of a place: they are of no case."""
        for line in filter(str.strip, lines):
            _log.warning("%s printed: %s", where or "the sweep", printable(line))


class _File(logging.FileHandler):
    """A log file; what can't be written to it is left out, and so is what may not be stored."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record."""
        return str(public(super().format(record)))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's name
        """Nothing: a full disk ends the run by its rows, not by its log."""


@contextmanager
def log_to(folder: Path, lowest: int) -> Iterator[None]:
    """Adds what happens within to the run's log, a line each: time (UTC), process, level, what."""
    whole, path = logging.getLogger("harness"), folder / run_files.LOG
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise OSError("a pipe would be waited for, and a link may lead to another's file")
        handler = _File(path, encoding="utf-8")
    except OSError:
        yield
        return
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(process)d %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = lambda seconds: datetime.fromtimestamp(seconds or 0, UTC).timetuple()
    handler.setFormatter(formatter)
    before = whole.level
    whole.addHandler(handler)
    whole.setLevel(lowest)
    try:
        yield
    finally:
        whole.setLevel(before)
        whole.removeHandler(handler)
        handler.close()


@contextmanager
def recorded(writer: RunWriter, note: ProgressFile | None = None) -> Iterator[None]:
    """Records that a run has failed, or was interrupted, where an exception ends the block; the exception goes on."""
    try:
        yield
    except BaseException as error:
        # SystemExit: a scheduler's handler ends this process
        state = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        _log.critical("%s: %s", state, one_line(error), exc_info=error)
        # What ended the block may end these too; the first exception is the one to report.
        if note is not None:
            with suppress(Exception):
                note.write(state=state, message=one_line(error))
        with suppress(Exception):
            writer.close(state)
        raise
