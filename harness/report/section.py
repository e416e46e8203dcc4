"""One section of a report: data, which the templates of the page show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.report.words import titled
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.drawing import Chart
    from harness.report.runs import Machine
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


def section(
    machine: Machine, key: str, facts: Mapping[str, Any] | None = None, *, block: str = "", timed: bool = False,
    **shown: Any,
) -> Section:  # fmt: skip
    """A section of a machine, with the title and introduction of a block of words.

    Args:
        machine: whose rows it shows.
        key: its name, which begins its id within the page.
        facts: that the words need beside the machine.
        block: of its words, `section_KEY`; where there is none its title is its key.
        timed: its figures are times: on a CPU they check the harness and nothing else, so it is folded and labelled.
        **shown: fields of `Section`.
    """
    title, intro = titled(block or f"section_{key}", key.capitalize(), machine=machine, **(facts or {}))
    if timed and not machine.is_gpu:
        title, shown["folded"] = f"CPU times: {title}", True
    return Section(f"{key}-{machine.env_id}", title, intro, **shown)
