"""Streams that a command writes to, though nobody takes what it writes: that ends no command and changes no exit code."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from harness.store.errors import UsageError

STDOUT = 1
_left: list[int] = []  # descriptors whose reader has left


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
            raise UsageError(
                f"standard output takes no more: {error.strerror}; write it to a place with room"
            ) from error
        return memoryview(data).nbytes


def of_people(descriptor: int) -> TextIO:
    """Lines to a terminal or a log, which may be full; closing it closes the descriptor."""
    raw = _Forgiving(descriptor, OSError, closefd=True)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def forgive() -> None:
    """From now on a reader of standard output that leaves, as `head` does, goes unnoticed, and so does whatever standard
    error refuses to take. A full disk behind standard output stays an error: its reader would miss something.
    """
    if sys.stdout is None:  # whoever started the command has closed it
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    else:
        sys.stdout = _forgiving(sys.stdout, BrokenPipeError)
    sys.stderr = _forgiving(sys.stderr, OSError)


def reader_left() -> bool:
    """Whether the reader of standard output has left."""
    return STDOUT in _left


def descriptor(stream: TextIO | None) -> int | None:
    """The descriptor behind a stream; None where there is none."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _forgiving(stream: TextIO, lost: type[OSError]) -> TextIO:
    number = descriptor(stream)
    if number is None or not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):
        stream.flush()
    raw = _Forgiving(number, lost, closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as python -u does
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
