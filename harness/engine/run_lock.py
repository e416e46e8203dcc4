"""Run lock: one writer at a time in the folder of a run, on all machines that see it.

The file `_writer.lock` is locked (`flock`) by its writer and names it. The kernel releases a lock however its holder ends, so
a lock that nobody holds is stale if its writer was on this host. A file system may keep the locks of each machine apart:
a writer elsewhere also touches its file every `BEAT_S`, and is taken for dead after `STALE_S` without a touch.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output
from harness.machine.processes import this_host
from harness.store.errors import UsageError
from harness.store.run_files import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEAT_S = 15.0
STALE_S = 120.0
LOOKS, LOOK_S = 5, 0.05
PATIENCE_S = STALE_S + BEAT_S  # until a writer elsewhere that died is forgotten for sure
_AGAIN_S = 1.0


class WriterElsewhereError(UsageError):
    """The writer is on another machine: it may have died there."""


@contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """The right to write into a folder, made where it is missing, until the block or this process ends.

    Args:
        folder: of a run or of one of its shards.
        patience_s: how long to wait for the end of a writer on another machine.

    Raises:
        UsageError: another writer has it, or the folder cannot be written to.
    """
    path, released = folder / LOCK, threading.Event()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _patiently_locked(path, patience_s)
        about = {"pid": os.getpid(), "host": this_host(), "hostname": socket.gethostname()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(about).encode(), 0)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with results_dir=DIR"
        ) from error
    beat = threading.Thread(target=_beat, args=(file, released), daemon=True)
    beat.start()
    try:
        yield
    finally:
        released.set()
        beat.join()
        with suppress(OSError):  # a full disk, or the folder itself is gone
            path.unlink(missing_ok=True)
        os.close(file)


def refuse_live(folder: Path) -> None:
    """Refuses a folder that another writer has.

    Raises:
        UsageError: names its process and host.
    """
    path = folder / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if _is_live(file, path):
            raise _refusal(path, _owner(file))
    finally:
        os.close(file)


def _patiently_locked(path: Path, patience_s: float) -> int:
    until, told = time.monotonic() + patience_s, False
    while True:
        try:
            return _locked(path)
        except WriterElsewhereError as error:
            if time.monotonic() >= until:
                raise
            if not told:
                raw_output.say(f"waits up to {patience_s:g} s: {error}\n")
            told = True
        time.sleep(_AGAIN_S)


def _locked(path: Path) -> int:
    """The descriptor of the lock file, locked by this process."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            if _is_live(file, path):
                raise _refusal(path, _owner(file))
            if _is_same(file, path):  # else its last writer has removed it meanwhile
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _owner(file: int) -> dict[str, Any]:
    """Note of a writer about itself; empty where there is none yet."""
    try:
        owner = json.loads(os.pread(file, 4096, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_live(file: int, path: Path) -> bool:
    """Whether another writer has the file; if not, this descriptor has locked it, where the file system can."""
    owner = _owner(file)
    try:
        _lock(file)
    except BlockingIOError:
        return True
    except OSError:  # no locks here: the signs of life decide
        return bool(owner) and _silent_s(file, path) < STALE_S
    return owner.get("host", this_host()) != this_host() and _silent_s(file, path) < STALE_S


def _lock(file: int) -> None:
    """Locks a file; BlockingIOError where it stays taken for longer than `refuse_live` of another process takes."""
    for _ in range(LOOKS):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(LOOK_S)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _silent_s(file: int, path: Path) -> float:
    """Seconds since the last touch, by the clock of the file system: those of two machines may differ."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - os.fstat(file).st_mtime
    except OSError:
        return time.time() - os.fstat(file).st_mtime


def _is_same(file: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _refusal(path: Path, owner: dict[str, Any]) -> UsageError:
    who = f"process {owner.get('pid', '?')} on {owner.get('hostname', '?')}" if owner else "another process"
    elsewhere = owner.get("host", this_host()) != this_host()
    return (WriterElsewhereError if elsewhere else UsageError)(
        f"run {path.parent.name} is being written by {who} ({path}); wait until it has ended, or give this run another "
        f"run_id; a writer on another machine that died is forgotten after {STALE_S:g} s"
    )


def _beat(file: int, released: threading.Event) -> None:
    while not released.wait(BEAT_S):
        with suppress(OSError):
            os.utime(file)
