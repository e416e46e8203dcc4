"""One section of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.drawing import Chart
    from harness.report.table import Grid, Table


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report: a short table, then figures, small grids (squares, heat maps) and the long tables."""

    key: str
    title: str
    intro: str = ""
    first: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    grids: Sequence[Grid] = ()
    tables: Sequence[Table] = ()
    folded: bool = False
    in_markdown: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", text.slug(self.key))  # it holds names of suites and arms

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """Short and long tables that have rows."""
        return tuple(t for t in (*self.first, *self.tables) if t.rows)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.charts or self.grids or self.all_tables)
