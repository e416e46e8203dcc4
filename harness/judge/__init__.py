"""Judge: what rows mean. Loss verdict, findings, differences, fleets, targets; no torch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

K = TypeVar("K")
V = TypeVar("V")


def gathered(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """Values by their key, both in order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found
