"""One sweep a GPU: an exclusive lock by the UUID of the device, for every user of this machine.

The lock is the kernel's, on an empty file in a folder that all may write to. It ends with the process that holds it, however
that ends, so nothing is ever left to clean up. What shares the GPU without sharing the folder (a container with a /tmp of
its own) shows as another process that computes there (`GpuMonitor.contended`), which marks the rows.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER_VARIABLE = "FP8_HARNESS_LOCKS"
FOLDER = "/tmp/fp8-harness-locks"  # not TMPDIR: batch systems give each job one of its own


@contextmanager
def held(uuids: Sequence[str], waits: bool = False) -> Iterator[None]:
    """Holds the lock of each GPU; one that this process holds already, for a sweep of sweeps, stays held.

    Args:
        uuids: of the GPUs.
        waits: for another process that holds one: shards of one sweep take turns.

    Raises:
        UsageError: another process holds one of them.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE, FOLDER))
    with ExitStack() as stack:
        for uuid in sorted(set(uuids)):
            path = folder / f"gpu-{uuid}.lock"
            try:
                if not folder.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    with suppress(PermissionError):  # another user's sweep was the first
                        folder.chmod(0o777 | stat.S_ISVTX)
                lock = FileLock(path, mode=0o666, is_singleton=True)
                stack.enter_context(lock.acquire(-1 if waits else 0))
            except Timeout:
                by = holder(path)
                raise UsageError(
                    f"GPU {uuid} is in use by another sweep{f' (process {by})' if by else ''}; wait for it, or choose "
                    "another one with devices=N or CUDA_VISIBLE_DEVICES"
                ) from None
            except OSError as error:
                raise UsageError(
                    f"cannot lock GPU {uuid}: {path}: {error.strerror}; {FOLDER_VARIABLE}=DIR names a folder that all users "
                    "of this machine share"
                ) from error
        yield


def holder(path: Path) -> int | None:
    """The process of this machine that holds the lock of a file, as the kernel has it; None where that can't be read."""
    with suppress(OSError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: FLOCK ADVISORY WRITE 4242 08:01:131 0 EOF"
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode and int(fields[4]) > 0:
                return int(fields[4])
    return None
