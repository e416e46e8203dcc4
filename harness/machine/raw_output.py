"""Raw output: what libraries write to standard error by themselves, kept from the terminal.

    with captured():
        ...           # a warning of Python, torch's logging, a line of a C++ library: all go to a file
        say("error")  # for people
        lines()       # what came since the last call

Descriptor 2 itself is redirected, so that it makes no difference who writes. Nested blocks share one file. What nobody has
read when the block ends with an exception, or this process with a signal, is shown after all: it may say why.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO

from harness.machine import streams

if TYPE_CHECKING:
    from collections.abc import Iterator

STDERR = 2
MOST_BYTES = 65_536  # of one reading: a log is no place for more
# Waits for the end of this process, told meanwhile how much was read; then shows the rest. No shell, no last words.
_GUARD = f"""\
read=0
while IFS= read -r told; do read=$told; done
tail -c "+$((read + 1))" "/proc/self/fd/$1" | tail -c {MOST_BYTES}
"""


class _Captured:
    """Where it goes, and for whom the rest is."""

    def __init__(self, file: IO[bytes], terminal: TextIO, guard: subprocess.Popen[bytes] | None) -> None:
        self.file, self.terminal, self.guard, self.read = file, terminal, guard, 0

    def rest(self) -> bytes:
        """What was written since the last call, of much its end; nothing where it cannot be read."""
        try:
            size = os.fstat(self.file.fileno()).st_size
            if size < self.read:  # a child has opened /dev/stderr anew, and cut it off
                self.read = 0
            if size == self.read:
                return b""
            begin = max(self.read, size - MOST_BYTES - 1)
            found = os.pread(self.file.fileno(), size - begin, begin)
        except OSError:
            return b""
        self.read = size
        if self.guard is not None and self.guard.stdin is not None:
            with suppress(OSError):
                self.guard.stdin.write(b"%d\n" % size)
        return found

    def show_rest(self) -> None:
        with suppress(OSError, ValueError):
            self.terminal.write(self.rest().decode(errors="replace"))
            self.terminal.flush()


_now: list[_Captured] = []  # none or one: a descriptor is the process's


def stream() -> TextIO:
    """Standard error as people see it."""
    return _now[0].terminal if _now else sys.stderr


def say(text: str) -> None:
    """Writes to people; a terminal or a file that takes nothing ends no command."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: there is none
        stream().write(text)
        stream().flush()


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

    A crash of this process prints the stack of each thread on the terminal, and what was not read.
    """
    if _now:
        try:
            yield
        except BaseException:
            _now[0].show_rest()
            raise
        return
    try:
        own = os.dup(STDERR)
    except OSError:  # there is none
        yield
        return
    before, faults = sys.stderr, faulthandler.is_enabled()
    with tempfile.TemporaryFile() as file, streams.of_people(own) as terminal:
        # Else a child that cuts the file off would leave a hole before what this process writes next.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        is_own = streams.descriptor(before) == STDERR
        with suppress(OSError, ValueError, AttributeError):
            before.flush()
        guard = _guard(file, own)
        os.dup2(file.fileno(), STDERR)
        if not is_own:  # a stream in its place, as in a notebook: it stays that of people
            sys.stderr = io.TextIOWrapper(
                io.FileIO(STDERR, "w", closefd=False), errors="backslashreplace", write_through=True
            )
        if not faults:
            faulthandler.enable(own)
        state = _Captured(file, terminal if is_own else before, guard)
        _now.append(state)
        try:
            yield
        except BaseException:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            state.show_rest()
            raise
        finally:
            _now.clear()
            with suppress(OSError, ValueError, AttributeError):
                before.flush()
            sys.stderr = before
            if not faults:
                faulthandler.disable()
            os.dup2(own, STDERR)
            if guard is not None:
                guard.kill()
                guard.communicate()


def _guard(file: IO[bytes], terminal: int) -> subprocess.Popen[bytes] | None:
    """Shows the rest once this process is gone, whatever it was that ended it."""
    try:
        return subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", str(file.fileno())],
            stdin=subprocess.PIPE,
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=[file.fileno()],
            start_new_session=True,  # a signal to all of a group, as Ctrl-C is, is not for it
        )
    except OSError:
        return None
