"""Names of extensions, read without importing them, fp8core or torch; what they bring is loaded by `fp8core.extensions`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

TABLES = ("peers", "suites", "recipes", "models", "backends")


@cache
def names(table: str) -> tuple[str, ...]:
    """What installed packages call their entries of a table of `TABLES`; some may be refused when they are loaded."""
    return tuple(sorted({entry.name for entry in entry_points(group=f"fp8_harness.{table}")}))
