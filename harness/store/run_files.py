"""Names of the files in the folder of a run that are no rows.

They begin with `_`, which pyarrow, and with it pandas, leaves out of a folder: `pandas.read_parquet(folder)` reads the rows.
Until November 2026 the names had no `_`; such folders are read as well, and a writer that continues one renames them. Where
both names lie in one folder (a copy over another, a run continued by an older version), the file written last counts.
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
_RENAMED = (ABOUT, LOG, PROGRESS, CHECKPOINTS)  # what a run of the older names may have left


def existing(folder: Path, name: str) -> Path:
    """The path of a file in a run's folder: of today's name and its older one that which was written last."""
    older = folder / former(name)
    return older if _written_ns(older) > _written_ns(folder / name) else folder / name


def former(name: str) -> str:
    """The name that a file had until November 2026."""
    return name.removeprefix("_")


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def below(folder: Path, name: str, pattern: str = "**") -> list[Path]:
    """Paths of the files of this name, or its older one, in all folders below that match a pattern; sorted, one a folder."""
    folders = {path.parent for n in (name, former(name)) for path in folder.glob(f"{pattern}/{n}")}
    return sorted(existing(found, name) for found in folders)


def rename_older(folder: Path) -> None:
    """Give the files of an older run their names of today; its writer has the folder to itself.

    Of two files the one written last gets the name, the other one is kept as `<name>.older`. What a folder of today's name
    lacks is moved into it, so that a run finds its checkpoints.
    """
    for name in _RENAMED:
        with suppress(OSError):  # one that stays is read under its older name
            older, today = folder / former(name), folder / name
            if not older.exists():
                continue
            if not today.exists():
                older.rename(today)
            elif older.is_dir():
                _move_in(older, today)
            else:
                last = existing(folder, name)
                (older if last == today else today).replace(folder / f"{name}.older")
                if last == older:
                    older.rename(today)


def _move_in(older: Path, today: Path) -> None:
    for path in older.iterdir():
        target = today / path.name
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        if not target.exists():
            path.rename(target)
    if any(older.iterdir()):
        older.rename(today.with_name(f"{today.name}.older"))
    else:
        older.rmdir()
