"""Run lock: one writer at a time in the folder of a run.

The lock is the kernel's, of the file `_writer.lock`: it ends with its holder, however that ends, on a file system of several
machines with the machine. Where such a file system keeps the locks of each machine apart, two of them may measure a
case twice; no row is lost by it, since each writer has files of its own. Where it has no `flock` at all, filelock warns and
takes the file itself for the lock: one that a killed writer left on another machine is then to be removed by hand.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from harness.machine import raw_output
from harness.machine.device_lock import holder
from harness.store.errors import UsageError
from harness.store.run_files import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GLANCE_S = 0.25  # longer than another process looks at the lock
PATIENCE_S = 135.0  # until a server of files has forgotten a machine that died


@contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """The right to write into a folder, made where it is missing, until the block or this process ends.

    Args:
        folder: of a run or of one of its shards.
        patience_s: how long to wait for a holder that is no process of this machine.

    Raises:
        UsageError: another writer has it, or the folder cannot be written to.
    """
    path = folder / LOCK
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(GLANCE_S)
        except Timeout:
            if holder(path) or not patience_s:
                raise
            raw_output.say(f"waits up to {patience_s:g} s: {_refusal(path)}\n")
            lock.acquire(patience_s)
    except Timeout:
        raise _refusal(path) from None
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with results_dir=DIR"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # a full disk, or the folder itself is gone
            path.unlink(missing_ok=True)
        lock.release()


def refuse_live(folder: Path) -> None:
    """Refuses a folder that another writer has.

    Raises:
        UsageError: names its process.
    """
    path = folder / LOCK
    if path.exists():
        try:
            with FileLock(path).acquire(0):
                pass
        except Timeout:
            raise _refusal(path) from None
        except OSError:  # it cannot be written to, which is refused where that is tried
            return


def _refusal(path: Path) -> UsageError:
    by = holder(path)
    who = f"process {by} on {socket.gethostname()}" if by else "a process of another machine or container"
    return UsageError(
        f"run {path.parent.name} is being written by {who} ({path}); wait until it has ended, or give this run another run_id"
    )
