"""Compared: what FP8 gained on several machines, on the cases they share.

Times of different machines are not set against each other: each machine's own ratio is, FP8 over bf16 in the same rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from harness.report.records import SQNR
from harness.report.section import Section
from harness.report.table import Column, known, make_table, number
from harness.report.verdicts import fp8_pairs
from harness.store import stats, text
from harness.store.compare import DISTURBED
from harness.store.differences import IDENTITY, differences
from harness.store.printer import Cell, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.report.runs import Machine, Material

    Found = Mapping[tuple[str, ...], dict[str, float]]  # key of an arm -> case -> figure

APART = "Each machine's own ratio of FP8 to bf16, side by side; times of two machines are not set against each other."
CAPTIONS = {
    "gains": "Speedup over bf16 of the same machine: geometric mean, then the range, over the cases that all have.",
    "exactness": "Least SQNR in dB over the shared cases: codes and products of FP8 are the same on every machine, or not.",
}
_GAIN_OF = ("suite", "arm", "baseline", "regime")


def shared(material: Material) -> tuple[Section, ...]:
    """What several machines have in common, which stands after each of them alone."""
    tables = across_machines(material)
    return (Section("machines", "Machines compared", APART, first=tables),) if tables else ()


def names(machines: Sequence[Machine]) -> list[str]:
    """A name for each machine; equal names get what else differs between the machines."""
    names = []
    for m in machines:
        found = differences([o.env for o in machines if o.name == m.name])
        fields = [name for name in found if name not in IDENTITY][:2]
        names.append(", ".join([m.name, *(f"{f.replace('_', ' ')} {m.env.get(f)}" for f in fields)]))
    return names


def across_machines(material: Material) -> list[Table]:
    """Gain of FP8 by GPU, then exactness by machine; a row an arm, over the cases that all of them measured."""
    gpus = [m for m in material.machines if m.is_gpu]
    keys = ("suite", "arm", "against", "regime"), ("suite", "arm", "result")
    tables = [
        _table("gains", keys[0], gpus, [_gains(m) for m in gpus], _ratio_cell),
        _table("exactness", keys[1], material.machines, [_exactness(m) for m in material.machines], min),
    ]
    return [t for t in tables if t.rows]


def _table(
    name: str,
    keys: Sequence[str],
    machines: Sequence[Machine],
    found: Sequence[Found],
    together: Callable[[list[float]], Any],
) -> Table:
    """A column for each part of the key and each machine, a row for what all of them have, in the order of the first."""
    records = []
    for key, cases in found[0].items() if len(found) > 1 else ():
        common = [case for case in cases if all(case in other.get(key, {}) for other in found)]
        if common:
            own = {
                f"machine {i}": together([own[key][case] for case in common]) for i, own in enumerate(found)
            }
            about = dict(zip(keys, key, strict=True))
            reproduced = [
                m.reproductions[about["arm"]].words for m in machines if about["arm"] in m.reproductions
            ]
            arm = Cell(about["arm"], about["arm"], note="; ".join(dict.fromkeys(reproduced)))
            records.append(about | {"arm": arm} | own | {"shared cases": len(common)})
    across = [number(title, f"machine {i}") for i, title in enumerate(names(machines))]
    columns = [*(Column(key) for key in keys), number("shared cases", show=str), *across]
    return make_table(f"machines-{name}", columns, records, CAPTIONS[name])


def _gains(machine: Machine) -> Found:
    """Speedups over bf16 that may decide something; the newest run."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for r in fp8_pairs(machine):
        if known(r["speedup"]) and r["condition"] not in DISTURBED:
            found[tuple(r[name] for name in _GAIN_OF)][r["case_id"]] = r["speedup"]
    return found


def _exactness(machine: Machine) -> Found:
    """SQNR of each result."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for r in machine.pick(metric=SQNR, status="ok", part=""):
        if math.isfinite(r["value"]):
            found[r["suite"], r["arm"], SQNR[r["metric"]]][r["case_id"]] = r["value"]
    return found


def _ratio_cell(ratios: Sequence[float]) -> Cell:
    mean = stats.geometric_mean(ratios).value
    note = text.spread(min(ratios), max(ratios), len(ratios), "case") if len(ratios) > 1 else ""
    return Cell(text.ratio(mean), mean, note=note)
