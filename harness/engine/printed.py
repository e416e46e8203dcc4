"""What a worker process prints: its end is kept for the row of a fault, whole lines are handed on to the log."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KEPT_BYTES = 4000  # of what was printed last
HANDED_BYTES = 65_536  # of one job: a log is no place for more
READ_BYTES = 1 << 16

OnLines = Callable[[list[str]], None]


class Printed:
    """Standard output and error of one worker, by a pipe.

    Args:
        pipe: the end to read from.
        on_lines: given whole lines as they come, of one job at most `HANDED_BYTES`.
    """

    def __init__(self, pipe: Connection, on_lines: OnLines) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.inode = os.fstat(pipe.fileno()).st_ino  # by which whoever holds the other end is known
        self._on_lines = on_lines
        self._kept = self._line = b""
        self._handed = 0
        self.pipe: Connection | None = pipe

    def begin(self) -> None:
        """Another job begins."""
        self._kept, self._handed = b"", 0

    def listen(self) -> None:
        """Reads what there is."""
        try:
            while self.pipe is not None and (piece := os.read(self.pipe.fileno(), READ_BYTES)):
                self._kept = (self._kept + piece)[-KEPT_BYTES:]
                self._hand_on(piece)
                if len(piece) < READ_BYTES:
                    return  # one that never stops printing must not keep this process from its other workers
        except BlockingIOError:
            return
        self.close()  # the worker has closed its end

    def last_lines(self) -> str:
        """The end of what the job has printed."""
        self.listen()
        if self._line:
            self._hand_on(b"\n")
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Reads no more."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _hand_on(self, piece: bytes) -> None:
        *lines, self._line = (self._line + piece).split(b"\n")
        self._line = self._line[-HANDED_BYTES:]
        if not lines or self._handed > HANDED_BYTES:
            return
        self._handed += sum(len(line) + 1 for line in lines)
        more = [b"(left out: what this job prints from here on)"] if self._handed > HANDED_BYTES else []
        self._on_lines([line.decode(errors="replace") for line in (*lines, *more)])
