"""Compared: what FP8 gained on several machines, on the cases they share.

Times of different machines are not set against each other: each machine's own ratio is, FP8 over bf16 in the same rounds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.report.numerics import SQNR
from harness.report.table import Cell, Column, Table, make_table, number
from harness.report.verdicts import fp8_pairs
from harness.store import stats, text
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.report.runs import Machine, Material

Key = tuple[str, ...]


def names(machines: Sequence[Machine]) -> list[str]:
    """A name for each machine; equal names get what else differs between the machines."""
    told = []
    for m in machines:
        twins = [o for o in machines if o.name == m.name]
        fields = [
            f for f in m.env if len({json.dumps(t.env.get(f)) for t in twins}) > 1 and f not in _OTHERWISE
        ]
        told.append(", ".join([m.name, *(f"{f.replace('_', ' ')} {m.env.get(f)}" for f in fields[:2])]))
    return told


_OTHERWISE = ("git_commit", "git_dirty", "host_hash", "gpu_uuid_hash")  # no time depends on them


def across_machines(material: Material) -> list[Table]:
    """Gain of FP8 by GPU, then exactness by machine; a row an arm, over the cases that all of them measured."""
    gpus = [m for m in material.machines if m.is_gpu]
    tables = []
    if len(gpus) > 1:
        gains = [_gains(m) for m in gpus]
        columns = _columns(("suite", "arm", "against", "regime"), names(gpus), gains, _ratio_cell)
        said = "Speedup over bf16 of the same machine: geometric mean, then the range, over the cases that all have."
        tables.append(make_table("machines-gains", columns, _shared(gains), said))
    exact = [_exactness(m) for m in material.machines]
    if len(exact) > 1:
        columns = _columns(("suite", "arm", "result"), names(material.machines), exact, min)
        said = "Least SQNR in dB over the shared cases: codes and products of FP8 are the same on every machine, or not."
        tables.append(make_table("machines-exactness", columns, _shared(exact), said))
    return [t for t in tables if t.rows]


def _columns(
    keys: Sequence[str],
    headings: Sequence[str],
    found: Sequence[Mapping[Key, Mapping[str, float]]],
    together: Callable[[list[float]], Any],
) -> list[Column]:
    """Columns of keys with their shared cases: one for each part of the key, one for each of `found` by its heading."""
    return [
        *(Column(title, partial(_part, i)) for i, title in enumerate(keys)),
        number("shared cases", lambda r: len(r[1]), str),
        *(
            number(heading, partial(_over_cases, own, together))
            for heading, own in zip(headings, found, strict=True)
        ),
    ]


def _part(i: int, record: tuple[Key, list[str]]) -> str:
    return record[0][i]


def _over_cases(
    own: Mapping[Key, Mapping[str, float]],
    together: Callable[[list[float]], Any],
    record: tuple[Key, list[str]],
) -> Any:
    key, cases = record
    return together([own[key][case] for case in cases])


def _gains(machine: Machine) -> dict[Key, dict[str, float]]:
    """Speedups over bf16 by (suite, arm, against, regime) and case; the newest run."""
    pairs = fp8_pairs(machine)
    found: dict[Key, dict[str, float]] = defaultdict(dict)
    for r in rows_of(pairs[pairs["speedup"].notna()]):
        found[r["suite"], r["arm"], r["baseline"], r["regime"]][r["case_id"]] = r["speedup"]
    return found


def _exactness(machine: Machine) -> dict[Key, dict[str, float]]:
    """SQNR by (suite, arm, result) and case."""
    found: dict[Key, dict[str, float]] = defaultdict(dict)
    for r in machine.rows:
        if r["metric"] in SQNR and r["status"] == "ok" and not r["part"] and math.isfinite(r["value"]):
            found[r["suite"], r["arm"], SQNR[r["metric"]]][r["case_id"]] = r["value"]
    return found


def _shared(found: Sequence[Mapping[Key, Mapping[str, Any]]]) -> list[tuple[Key, list[str]]]:
    """Keys and cases that all of them have, in the order of the first."""
    out = []
    for key, cases in found[0].items() if found else ():
        common = [case for case in cases if all(case in other.get(key, {}) for other in found)]
        if common:
            out.append((key, common))
    return out


def _ratio_cell(ratios: Sequence[float]) -> Cell:
    if not ratios:
        return Cell("", None)
    mean = stats.geometric_mean(ratios).value
    note = text.spread(min(ratios), max(ratios), len(ratios), "case") if len(ratios) > 1 else ""
    return Cell(text.ratio(mean), mean, note=note)
