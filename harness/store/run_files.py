"""Names of the files in the folder of a run that are no rows.

They begin with `_`, which pyarrow, and with it pandas, leaves out of a folder: `pandas.read_parquet(folder)` reads the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "_run.json"  # command, configuration, state
LOG = "_run.log"
PROGRESS = "_progress.json"
LOCK = "_writer.lock"
SALT = "_salt"  # of a results folder, not of a run: says which runs were made in it
CHECKPOINTS = "_checkpoints"  # folder, for training runs under way
LAUNCH = "_launch"  # folder, for what a Hydra launcher writes


def below(folder: Path, name: str, pattern: str = "**") -> list[Path]:
    """Paths of the files of this name in all folders below that match a pattern, sorted."""
    return sorted(folder.glob(f"{pattern}/{name}"))
