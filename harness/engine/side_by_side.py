"""Shards side by side on this machine: each computes at a place of its own, and all end with their command.

Whoever starts their processes (joblib, submitit), they share a folder of files with the command that asked for them. The
files are there to be locked (`flock`), and the kernel lets go of a lock however its holder ends. `command` is locked by
the command for as long as its shards may work; each of their processes waits for that lock in a thread. `acquire_place-0`,
`acquire_place-1`, ... are locked by the processes that have these places.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.machine.processes import ENDING_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK_S = 0.5  # between two looks at places that are all taken
_COMMAND = "command"
_OVER = b"over"  # in that file: the command lives, and waits for its shards to end

_busy = threading.Lock()  # held while this process works on a shard


class Coordinator:
    """The command's side; its shards get `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = os.open(folder / _COMMAND, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def end(self) -> None:
        """Interrupt the running shards; later ones do nothing."""
        with suppress(OSError):  # a full disk: the shards end as if this command had died
            os.write(self._file, _OVER)
        fcntl.flock(self._file, fcntl.LOCK_UN)


@contextmanager
def lead() -> Iterator[Coordinator]:
    """Coordinate the shards on this machine until the block or this process ends."""
    with tempfile.TemporaryDirectory(prefix="fp8-harness-", ignore_cleanup_errors=True) as folder:
        own = Coordinator(Path(folder))
        try:
            yield own
        finally:
            own.end()


@cache
def exit_with(folder: str) -> None:
    """End this process with the command, which alone handles Ctrl-C of a terminal.

    When the command ends, this process sends itself SIGTERM; if the command died, it exits after its shard. Between two
    shards it ignores the ending signals, which a scheduler sends to all processes: joblib would report its end as a crash.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING_SIGNALS[1:]:
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_watch_command, args=(Path(folder),), daemon=True).start()


@contextmanager
def shard_turn(folder: str) -> Iterator[bool]:
    """Hold the turn for one shard, within `interruptible`; False if the command has ended."""
    with _busy:
        yield not _is_over(Path(folder))


@cache
def acquire_place(folder: str, count: int) -> int:
    """Index of this process's place, below `count` and reserved until it ends; wait while all are taken."""
    files = [
        os.open(Path(folder) / f"place-{index}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        for index in range(count)
    ]
    while True:
        for index, file in enumerate(files):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return index
        time.sleep(LOOK_S)


def _watch_command(folder: Path) -> None:
    try:
        file = os.open(folder / _COMMAND, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # it has ended and removed its folder
        return
    fcntl.flock(file, fcntl.LOCK_SH)
    died = os.read(file, len(_OVER)) != _OVER
    os.kill(os.getpid(), signal.SIGTERM)
    if died:  # no other process would end this one
        with _busy:
            os._exit(1)


def _is_over(folder: Path) -> bool:
    try:
        file = os.open(folder / _COMMAND, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
