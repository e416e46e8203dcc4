"""The sections of a report: each is data (`sections.yaml`), which the templates of the page show. One whose suites were not
measured is not entered; one that has nothing to show falls away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.store import text
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.report.drawing import Chart
    from harness.report.runs import Machine
    from harness.store.printer import Table

PARTS = ("first", "charts", "tables")


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report: a short table, then figures, the long tables, and facts as (name, value)."""

    key: str
    title: str
    intro: str = ""
    first: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    folded: bool = False
    in_markdown: bool = True
    facts: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", text.slug(self.key))  # it holds names of suites and arms

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """Short and long tables that have rows."""
        return tuple(t for t in (*self.first, *self.tables) if t.rows)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.charts or self.all_tables or self.facts)


@cache
def plans() -> Mapping[str, Mapping[str, Any]]:
    """What `sections.yaml` says of each section."""
    found: Mapping[str, Mapping[str, Any]] = beside(__file__, "sections.yaml")
    return found


def sections(machine: Machine, first: str = "") -> tuple[Section, ...]:
    """All sections of a machine that have something to show, the one named `first` before all, folded ones last."""
    known = {suite for plan in plans().values() for suite in plan.get("reads", ())}
    found = []
    for key, plan in plans().items():
        if key == "*":
            found += [_section(machine, suite, plan) for suite in machine.suites if suite not in known]
        elif not plan.get("reads") or set(plan["reads"]) & set(machine.suites):
            found.append(_section(machine, key, plan))
    open_key = f"{first}-{machine.env_id}"
    return tuple(sorted((s for s in found if not s.empty), key=lambda s: (s.folded, s.key != open_key)))


def _section(machine: Machine, key: str, plan: Mapping[str, Any]) -> Section:
    shown = {part: list(_made(machine, key, plan.get(part, ()))) for part in PARTS}
    title = plan.get("title", key.capitalize())
    folded = plan.get("folded", False)
    if plan.get("timed") and not machine.is_gpu:
        title, folded = f"CPU times: {title}", True
    return Section(
        f"{key}-{machine.env_id}",
        title,
        plan.get("intro", ""),
        folded=folded,
        in_markdown=plan.get("in_markdown", True),
        **shown,
    )


def _made(machine: Machine, key: str, names: Sequence[str | list[str]]) -> Iterator[Any]:
    """What functions make, each a table, or several tables or figures."""
    for name in names:
        called, *more = [name] if isinstance(name, str) else name
        module, _, function = called.partition(".")
        made = getattr(import_module(f"harness.report.{module}"), function)
        found = made(machine, *(key if word == "*" else word for word in more))
        yield from found if isinstance(found, list) else [found]
