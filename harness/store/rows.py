"""Rows: those of a frame as dictionaries, all at once or each when it is first asked for: a report shows a tenth of them.

pandas is imported on use: it starts a thread, and suites import `harness.store.compare` in the server that workers are forked from.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    import pandas as pd
    from numpy.typing import NDArray

    Row = dict[str, Any]
    Wanted = str | Container[str] | Callable[[str], object]


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """Values by their key, both in order."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries."""
    names = [str(name) for name in frame.columns]
    columns = [frame[name].tolist() for name in frame.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


class Rows:
    """The rows of a frame."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self._made: dict[int, Row] = {}
        self._columns: dict[str, tuple[NDArray[np.intp], list[Any]]] = {}

    def where(self, **wanted: Wanted) -> NDArray[np.bool_]:
        """Which rows have these values: one, any of several, or those that a function accepts."""
        fits = np.ones(len(self._frame), bool)
        for name, value in wanted.items():
            if name not in self._columns:
                import pandas as pd

                found, distinct = pd.factorize(self._frame[name], use_na_sentinel=False)
                self._columns[name] = found, list(distinct)
            codes, words = self._columns[name]
            if callable(value):
                accepted = [bool(value(word)) for word in words]
            else:
                values = (value,) if isinstance(value, str) else value
                accepted = [word in values for word in words]
            fits &= np.array(accepted, bool)[codes]
        return fits

    def pick(self, most: int | None = None, /, **wanted: Wanted) -> list[Row]:
        """The rows that `where` names, or so many of them; to be read only."""
        positions = np.flatnonzero(self.where(**wanted)).tolist()[:most]
        missing = [i for i in positions if i not in self._made]
        if missing:
            self._made.update(zip(missing, rows_of(self._frame.iloc[missing]), strict=True))
        return [self._made[i] for i in positions]
