"""Store: what was measured, kept and compared. Cases, rows, Parquet files, statistics and effects; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.store.parquet import (
        SCHEMA,
        RunWriter,
        find_run,
        new_run_id,
        open_run,
        read,
        read_about,
        run_folder,
    )

__all__ = [
    "SCHEMA",
    "RunWriter",
    "find_run",
    "new_run_id",
    "open_run",
    "read",
    "read_about",
    "run_folder",
]


def __getattr__(name: str) -> Any:
    """Import the Parquet part on first use: names and errors of this room are needed before pandas is."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.store import parquet

    return getattr(parquet, name)
