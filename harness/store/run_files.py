"""Names of the files in the folder of a run that are no rows.

They begin with `_`, which pyarrow, and with it pandas, leaves out of a folder: `pandas.read_parquet(folder)` reads the rows.
Until November 2026 the names had no `_`; such folders are read as well, and a writer that continues one renames them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "_run.json"  # command, configuration, state
LOG = "_run.log"
PROGRESS = "_progress.json"
LOCK = "_writer.lock"
CHECKPOINTS = "_checkpoints"  # folder, for training runs under way
LAUNCH = "_launch"  # folder, for what a Hydra launcher writes
_RENAMED = (ABOUT, LOG, PROGRESS, CHECKPOINTS)  # what a run of the older names may have left


def existing(folder: Path, name: str) -> Path:
    """The path of a file in a run's folder: under its older name where it has that alone."""
    older = folder / name.removeprefix("_")
    return older if older.exists() and not (folder / name).exists() else folder / name


def below(folder: Path, name: str, pattern: str = "**") -> list[Path]:
    """Paths of the files of this name, or its older one, in all folders below that match a pattern; sorted, one a folder."""
    folders = {path.parent for n in (name, name.removeprefix("_")) for path in folder.glob(f"{pattern}/{n}")}
    return sorted(existing(found, name) for found in folders)


def rename_older(folder: Path) -> None:
    """Give the files of an older run their names of today; its writer has the folder to itself."""
    for name in _RENAMED:
        with suppress(OSError):  # one that stays is read under its older name
            older = existing(folder, name)
            if older.name != name and older.exists():
                older.rename(folder / name)
