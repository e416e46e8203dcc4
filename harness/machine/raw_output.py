"""Raw output: what libraries write to standard error by themselves, kept from the terminal.

    with captured():
        ...                      # a warning of Python, torch's logging, a line of a C++ library: all go to a file
        stream().write("error")  # for people
        lines()                  # what came since the last call

Descriptor 2 itself is redirected, so that it makes no difference who writes. Nested blocks share one file.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

STDERR = 2
MOST_BYTES = 65_536  # of one reading: a log is no place for more


class _Captured:
    """Where it goes, and for whom the rest is."""

    def __init__(self, file: IO[bytes], terminal: TextIO) -> None:
        self.file, self.terminal, self.read = file, terminal, 0

    def rest(self) -> bytes:
        size = os.fstat(self.file.fileno()).st_size
        if size == self.read:
            return b""
        found = os.pread(self.file.fileno(), size - self.read, self.read)
        self.read = size
        return found


_now: list[_Captured] = []  # none or one: a descriptor is the process's


def stream() -> TextIO:
    """Standard error as people see it."""
    return _now[0].terminal if _now else sys.stderr


def lines() -> list[str]:
    """What was captured since the last call; the end of what is too long for a log."""
    if not _now:
        return []
    found = _now[0].rest()
    left_out = ["(left out: the lines before)"] if len(found) > MOST_BYTES else []
    return left_out + found[-MOST_BYTES:].decode(errors="replace").splitlines()


@contextmanager
def captured() -> Iterator[None]:
    """Descriptor 2 and `sys.stderr` write to a file within the block.

    Where an exception ends it that is no refusal, what was not read yet is shown after all: it may say why.
    A crash of this process prints the stack of each thread on the terminal.
    """
    if _now:
        yield
        return
    try:
        own = os.dup(STDERR)
    except OSError:  # there is none
        yield
        return
    before, faults = sys.stderr, faulthandler.is_enabled()
    with (
        tempfile.TemporaryFile() as file,
        os.fdopen(own, "w", buffering=1, errors="backslashreplace", encoding="utf-8") as terminal,
    ):
        is_own = _descriptor(before) == STDERR
        with suppress(OSError, ValueError):
            before.flush()
        os.dup2(file.fileno(), STDERR)
        if not is_own:  # a stream in its place, as in a notebook: it stays that of people
            sys.stderr = io.TextIOWrapper(
                io.FileIO(STDERR, "w", closefd=False), errors="backslashreplace", write_through=True
            )
        if not faults:
            faulthandler.enable(own)
        state = _Captured(file, terminal if is_own else before)
        _now.append(state)
        try:
            yield
        except (UsageError, KeyboardInterrupt):
            raise
        except BaseException:
            with suppress(OSError, ValueError):
                state.terminal.write(state.rest().decode(errors="replace"))
            raise
        finally:
            _now.clear()
            with suppress(OSError, ValueError):
                before.flush()
            sys.stderr = before
            if not faults:
                faulthandler.disable()
            os.dup2(own, STDERR)


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
