"""One sweep a GPU: an exclusive lock by the UUID of the device, for every user of this machine.

The lock is an `flock` on an empty file in a folder that all may write to. It ends with the process that holds it, however
that ends, so nothing is ever left to clean up. What shares the GPU without sharing the folder (a container with a /tmp of
its own) shows as another process that computes there (`GpuMonitor.contended`), which marks the rows.

Not by `filelock`, which refuses a file of another user in a folder with the sticky bit: the GPU would be that user's for ever.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER_VARIABLE = "FP8_HARNESS_LOCKS"
FOLDER = "/tmp/fp8-harness-locks"  # not TMPDIR: batch systems give each job one of its own


@contextmanager
def held(uuids: Sequence[str], waits: bool = False) -> Iterator[None]:
    """Holds the lock of each GPU.

    Args:
        uuids: of the GPUs.
        waits: for another process that holds one: shards of one sweep take turns.

    Raises:
        UsageError: another process holds one of them.
    """
    with ExitStack() as stack:
        for uuid in sorted(set(uuids)):
            file = _opened(uuid)
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                by = holder(Path(f"/proc/self/fd/{file}"))
                raise UsageError(
                    f"GPU {uuid} is in use by another sweep{f' (process {by})' if by else ''}; wait for it, or choose "
                    "another one with devices=N or CUDA_VISIBLE_DEVICES"
                ) from None
        yield


def _opened(uuid: str) -> int:
    """The lock file of a GPU, whoever made it; made if it is not there. No link is followed: others write there too."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, FOLDER))
    path = folder / f"gpu-{uuid}.lock"
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # another user's sweep was the first
                folder.chmod(0o777 | stat.S_ISVTX)
        with suppress(FileExistsError):
            made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            os.fchmod(made, 0o644)  # whatever the umask
            os.close(made)
        # Without O_CREAT: the kernel refuses that on another user's file here (fs.protected_regular).
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"cannot lock GPU {uuid}: {path}: {error.strerror}; {FOLDER_VARIABLE}=DIR names a folder that all users "
            "of this machine share"
        ) from error


def holder(path: Path) -> int | None:
    """The process of this machine that holds the lock of a file, as /proc/locks has it; None where that can't be read."""
    with suppress(OSError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: FLOCK ADVISORY WRITE 4242 08:01:131 0 EOF"
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode and int(fields[4]) > 0:
                return int(fields[4])
    return None
