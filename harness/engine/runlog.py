"""What a run tells those who wait for it: `_run.log` in its folder, and `_progress.json`, which `watch` reads.

Both are for people. Neither is read to decide anything, and a disk that refuses them costs no row: the store says so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from harness.machine import raw_output
from harness.machine.processes import began, this_host
from harness.machine.terminal import printable
from harness.store import RunWriter, run_files
from harness.store.errors import one_line
from harness.store.private import public

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from harness.engine.stages import Frame
    from harness.store.measurement import Measurement

EVERY_S = 1.0  # between two notes of steps; a unit that begins is noted at once

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
