"""The sections of a report: each is data, which the templates of the page show, and names the suites that it reads. One whose
suites were not measured is not entered; one that has nothing to show falls away.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.report.words import titled
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.drawing import Chart
    from harness.report.runs import Machine
    from harness.report.table import Grid, Table


# Module and function of each section -> the suites that it reads; none named: any.
BEFORE = {
    "tables.findings": (),
    "training.losses": ("divergence",),
    "training.gates": ("divergence",),
    "compatibility.parallel": ("parallel",),
    "gathers.gathers": ("allgather",),
    "tables.agreement": ("agree",),
    "tables.speed": (),
    "league.league": ("cast", "gemm", "linear", "train"),
    "tables.squares": ("linear",),
    "tables.numerics": (),
    "steps.steps": ("train",),
}
# A table of all its rows: each other suite, in this order; those that are not named follow.
OWN = ("linear", "gemm", "cast", "ceilings", "recipes", "outliers", "scale", "ab")
INSTEAD = {"scale": "scaling.scale"}
BEFORE_OWN = {"ab": "trials.trials"}
AFTER = {"tables.compile_times": (), "tables.troubles": (), "tables.every_row": ()}


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
    machine: Machine, key: str, facts: Mapping[str, Any] | None = None, *, block: str | None = None, timed: bool = False,
    **shown: Any,
) -> Section:  # fmt: skip
    """A section of a machine, with the title and introduction of a block of words.

    Args:
        machine: whose rows it shows.
        key: its name, which begins its id within the page.
        facts: that the words need beside the machine.
        block: of its words, where it is not `section_KEY`; "": it has none, and its title is its key.
        timed: its figures are times: on a CPU they check the harness and nothing else, so it is folded and labelled.
        **shown: fields of `Section`.
    """
    block = f"section_{key}" if block is None else block
    title, intro = titled(block, machine=machine, **(facts or {})) if block else (key.capitalize(), "")
    if timed and not machine.is_gpu:
        title, shown["folded"] = f"CPU times: {title}", True
    return Section(f"{key}-{machine.env_id}", title, intro, **shown)


def sections(machine: Machine, first: str = "") -> tuple[Section, ...]:
    """All sections of a machine that have something to show, the one named `first` before all, folded ones last."""
    has = machine.suites
    told = {suite for reads in BEFORE.values() if len(reads) == 1 for suite in reads} - set(OWN)
    found = [_call(name, machine) for name, reads in BEFORE.items() if not reads or set(reads) & set(has)]
    for suite in sorted(set(has) - told, key=lambda name: [*OWN, *has].index(name)):
        if suite in BEFORE_OWN:
            found.append(_call(BEFORE_OWN[suite], machine))
        found.append(
            _call(INSTEAD[suite], machine) if suite in INSTEAD else _call("tables.suite", machine, suite)
        )
    found += [_call(name, machine) for name in AFTER]
    lead = f"{first}-{machine.env_id}"
    return tuple(sorted((s for s in found if not s.empty), key=lambda s: (s.folded, s.key != lead)))


def _call(name: str, machine: Machine, *more: str) -> Section:
    module, _, function = name.partition(".")
    found: Section = getattr(import_module(f"harness.report.{module}"), function)(machine, *more)
    return found
