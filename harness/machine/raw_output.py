"""Raw output: what libraries write to standard error by themselves, kept from the terminal; and streams that nobody reads.

    with captured():
        ...           # a warning of Python, torch's logging, a line of a C++ library: all go to a file
        notify("error")  # for people
        lines()       # what came since the last call

Descriptor 2 itself is redirected, so that it makes no difference who writes. Nested blocks share one file. What nobody has
read when the block ends with an exception is shown after all: it may say why.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TextIO

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

STDOUT, STDERR = 1, 2
MOST_BYTES = 65_536  # of one reading: a log is no place for more


class _Captured(NamedTuple):
    """Where it goes, and the stream that people see."""

    file: IO[bytes]
    people: TextIO


_now: list[_Captured] = []  # none or one: a descriptor is the process's
_left: list[int] = []  # descriptors whose reader has left
_full: list[str] = []  # why standard output took no more, whoever was told of it


def stream() -> TextIO:
    """Standard error as people see it."""
    return unguarded(_now[0].people if _now else sys.stderr)


def printable(text: str, keep: str = "") -> str:
    """Control characters as their escapes.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def notify(text: str) -> None:
    """Writes to people; a terminal or a file that takes nothing ends no command."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: there is none
        stream().write(printable(text, keep="\n\t"))
        stream().flush()


class _Printable:
    """A stream that is given text from outside: no character of it reaches a terminal as a command."""

    def __init__(self, to: TextIO) -> None:
        self.to = to

    def write(self, text: str) -> int:
        return self.to.write(printable(text, keep="\n\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.to, name)


@contextmanager
def guarded() -> Iterator[None]:
    """All that is printed within goes through the one printer for text from outside."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Printable, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unguarded(stream: TextIO) -> TextIO:
    """The stream below, for one that draws with codes of its own."""
    return stream.to if isinstance(stream, _Printable) else stream


def refuse(error: object) -> None:
    """Says in one line why a command was not carried out: what an error quotes begins none of its own."""
    notify(f"error: {' '.join(str(error).split())}\n")


def lines() -> list[str]:
    """What was captured since the last call, of much its end."""
    return _now[0].file.read()[-MOST_BYTES:].decode(errors="replace").splitlines() if _now else []


@contextmanager
def captured() -> Iterator[None]:
    """Descriptor 2 and `sys.stderr` write to a file within the block."""
    if _now:
        yield
        return
    own = os.dup(STDERR)
    before = sys.stderr
    is_own = _descriptor(before) == STDERR
    raw = io.BufferedWriter(_Forgiving(own, OSError, closefd=True))
    with (
        tempfile.NamedTemporaryFile() as file,
        Path(file.name).open("rb", buffering=0) as reader,
        io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True) as terminal,
    ):
        os.dup2(file.fileno(), STDERR)
        if not is_own:  # a stream in its place, as in a notebook: it stays that of people
            sys.stderr = io.TextIOWrapper(io.FileIO(STDERR, "w", closefd=False), write_through=True)
        _now.append(_Captured(reader, terminal if is_own else before))
        crashes = faulthandler.is_enabled()
        faulthandler.enable(own)
        try:
            yield
        except BaseException:
            notify("".join(f"{line}\n" for line in lines()))
            raise
        finally:
            faulthandler.enable(STDERR) if crashes else faulthandler.disable()
            _now.clear()
            sys.stderr = before
            os.dup2(own, STDERR)


class _Forgiving(io.FileIO):
    """A descriptor; what it refuses to take with `lost` is dropped. Any other refusal is raised once."""

    def __init__(self, descriptor: int, lost: type[OSError], closefd: bool) -> None:
        super().__init__(descriptor, "w", closefd=closefd)
        self._lost = lost

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._lost as error:
            if isinstance(error, BrokenPipeError):
                _left.append(self.fileno())
        except OSError as error:
            self._lost = OSError  # what is still buffered would raise again as the interpreter exits
            _full.append(f"standard output takes no more: {error.strerror}; write it to a place with room")
            raise UsageError(_full[-1]) from error
        return memoryview(data).nbytes


def refuse_full() -> None:
    """Standard output is whole, or the command was not carried out: a thread may have been told of it alone.

    Raises:
        UsageError: it lacks something.
    """
    # A full disk behind it is heard of here, not as the interpreter exits; there may be no stream
    print(end="", flush=True)  # noqa: T201
    if _full:
        raise UsageError(_full[0])


def forgive() -> None:
    """From now on a reader of standard output that leaves, as `head` does, goes unnoticed, and so does whatever standard
    error refuses to take. A full disk behind standard output stays an error: its reader would miss something.
    """
    for number in (0, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:  # closed: the next pipe would take its number, and get what is printed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:  # whoever started the command has closed it
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    else:
        sys.stdout = _forgiving(sys.stdout, BrokenPipeError)
    sys.stderr = _forgiving(sys.stderr, OSError)


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _forgiving(stream: TextIO, lost: type[OSError]) -> TextIO:
    number = _descriptor(stream)
    if number is None or not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):
        stream.flush()
    raw = _Forgiving(number, lost, closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as python -u does
        encoding=stream.encoding,
        errors="backslashreplace",  # a path may have what a terminal's encoding lacks
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
