"""Names of the files in the folder of a run that are no rows.

They begin with `_`, which pyarrow, and with it pandas, leaves out of a folder: `pandas.read_parquet(folder)` reads the rows.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from harness.store.outside import from_json, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ABOUT = "_run.json"  # command, configuration, state
LOG = "_run.log"
PROGRESS = "_progress.json"
LOCK = "_writer.lock"
SALT = "_salt"  # of a results folder, not of a run: says which runs were made in it
CHECKPOINTS = "_checkpoints"  # folder, for training runs under way
LAUNCH = "_launch"  # folder, for what a Hydra launcher writes
SHARD = re.compile(r"shard-\d+-of-(\d+)")  # folder within that of a run


MOST_BYTES = 2**24  # of one of these files that is read
# Entries of `_run.json` that are computed with; one of another type is no harness's and counts as missing.
_KINDS: dict[str, type] = {
    **dict.fromkeys(
        ("run_id", "sweep", "state", "started_at", "ended_at", "command", "made_by", "mark"), str
    ),
    **dict.fromkeys(("config", "gate", "parts"), dict),
}
_COUNTS = ("stage", "pairs", "rounds")  # of the gate


def shards(folder: Path) -> dict[Path, int]:
    """Folders of the shards of a run, sorted, each with how many its spread has."""
    found = [(path, SHARD.fullmatch(path.name)) for path in sorted(folder.glob("shard-*"))]
    return {path: int(named[1]) for path, named in found if named}


def below(folder: Path, name: str, pattern: str = "**") -> list[Path]:
    """Paths of the files of this name in all folders below that match a pattern, sorted."""
    return sorted(folder.glob(f"{pattern}/{name}"))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in one of these files; empty where it is missing, damaged, too large or no file."""
    try:
        content = from_json(read_bytes(file, MOST_BYTES), finite=True)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_about(folder: Path) -> dict[str, Any]:
    """The contents of a run's `_run.json`; empty where it is missing or damaged (the rows stand without it)."""
    known = read_object(folder / ABOUT).items()
    about: dict[str, Any] = {k: value for k, value in known if isinstance(value, _KINDS.get(k, object))}
    is_sound = all(isinstance(about.get("gate", {}).get(key, 0), int) for key in _COUNTS)
    return about if is_sound else {}


@contextmanager
def written(target: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file that takes its name when the block ends, so that nobody reads half of it.

    Args:
        target: its name; one that is there is replaced.
        durable: the content reaches the disk before the name.
    """
    # Not by the process's number: two containers on one folder may have the same.
    temporary = target.with_name(f"_{target.stem.lstrip('_')}.{secrets.token_hex(4)}.tmp")
    try:
        with _locked(temporary) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _locked(temporary: Path) -> IO[bytes]:
    """A new file that says by a lock that its writer lives."""
    while True:
        file = temporary.open("wb")
        with suppress(OSError):  # without locks nobody removes it either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else it was removed before the lock was had
            return file
        file.close()


def remove_abandoned(folder: Path) -> None:
    """Removes what killed writers left half written; that of a live one is locked."""
    for temporary in folder.glob("_*.tmp"):
        with suppress(OSError):
            descriptor = os.open(temporary, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()
            finally:
                os.close(descriptor)
