"""Sections: the parts of a machine's report in reading order, each with the suites that it reads. One whose suites were
not measured is not entered; one that has nothing to show falls away.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from harness.report import tables

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.report.section import Section

# Module and function of each section -> the suites that it reads; none named: any.
BEFORE = {
    "tables.findings": (),
    "training.losses": ("divergence",),
    "training.gates": ("divergence",),
    "compatibility.parallel": ("parallel",),
    "gathers.gathers": ("allgather",),
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


def sections(machine: Machine, first: str = "") -> tuple[Section, ...]:
    """All sections of a machine that have something to show, the one named `first` before all, folded ones last."""
    has = machine.suites
    told = {suite for reads in BEFORE.values() if len(reads) == 1 for suite in reads} - set(OWN)
    found = [_call(name, machine) for name, reads in BEFORE.items() if not reads or set(reads) & set(has)]
    for suite in sorted(set(has) - told, key=lambda name: [*OWN, *has].index(name)):
        if suite in BEFORE_OWN:
            found.append(_call(BEFORE_OWN[suite], machine))
        found.append(_call(INSTEAD[suite], machine) if suite in INSTEAD else tables.suite(machine, suite))
    found += [_call(name, machine) for name in AFTER]
    lead = f"{first}-{machine.env_id}"
    return tuple(sorted((s for s in found if not s.empty), key=lambda s: (s.folded, s.key != lead)))


def _call(name: str, machine: Machine) -> Section:
    module, _, function = name.partition(".")
    found: Section = getattr(import_module(f"harness.report.{module}"), function)(machine)
    return found
