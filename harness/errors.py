"""What ends a command in one clear line and exit code 2."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class UsageError(ValueError):
    """The request cannot be carried out; the message names the value, the expectation and the way out."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not in a table: the nearest one first, then all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" (nearest: {near[0]})" if near else ""
    return UsageError(f"unknown {kind} {name!r}{hint}; known: {', '.join(names)}")
