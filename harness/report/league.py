"""League: fp8core beside the other implementations, each on what both measured: cast, product, layer, whole step.

Ranked together are only arms with the same cases: those that the arm, ours and bf16 all have a time of in one run. An
implementation that can do the easy half of the cases alone is set against ours and bf16 on that half.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.report.records import SQNR, arm_records
from harness.report.table import Cell, Table, known, resolved_of, table_of
from harness.report.words import say
from harness.store import stats, text
from harness.store.case import WITHOUT_FP8, arm_of
from harness.store.errors import Cause
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from harness.report.runs import Machine
    from harness.report.table import Record, Row

    Times = Mapping[tuple[str, str], Record]  # of an arm, by run and case

LEVELS = {"cast": "cast", "gemm": "GEMM", "linear": "linear layer", "train": "training step"}


def league_table(machine: Machine) -> Table:
    """The places, and who is not there with the way to get it."""
    absent = dict.fromkeys(r["reason"] for r in machine.pick(suite=LEVELS, cause=Cause.MISSING))
    return table_of(machine, "league", places(machine), say("caption_league", absent="; ".join(absent)))


def places(machine: Machine) -> list[Row]:
    """The arms of peers that have a time, each league with our arm among them on the same cases, the fastest first.

    `cases`: that the arm, ours and bf16 all have a time of; the figures are of these alone. `against_ours`: our time over
    its time, geometric mean, above 1 it is faster; `over_bf16` likewise of the bf16 baseline, of casts of our eager one;
    `sqnr_db`: the worst of any case and result; `mismatches`: codes of casts that differ from the reference, where counted.
    """
    found: list[Row] = []
    for suite, level in LEVELS.items():
        by_arm: dict[str, dict[tuple[str, str], Record]] = {}
        if not machine.rows.where(suite=suite, resolved=lambda said: "peer" in parse(said)).any():
            continue
        for r in arm_records(machine, suite):
            if r["status"] == "ok" and r["regime"] in ("isolated", ""):
                by_arm.setdefault(r["arm"], {})[r["run_id"], r["case_id"]] = r
        leagues: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = {}
        for arm, records in by_arm.items():
            if resolved_of(_any(records)).get("peer"):
                ours = _ours(suite, records)
                shared = _shared([by_arm[a] for a in (arm, ours, _root(arm, by_arm)) if a in by_arm])
                leagues.setdefault((ours, shared), []).append(arm)
        for (ours, shared), arms in leagues.items():
            own = [ours] * bool(ours in by_arm and shared) + arms
            rows = [{"level": level, "ours": ours} | _place(a, ours, shared, by_arm) for a in own]
            found += sorted(rows, key=lambda p: -p["against_ours"] if known(p["against_ours"]) else math.inf)
    return found


def _place(arm: str, ours: str, shared: Iterable[tuple[str, str]], by_arm: Mapping[str, Times]) -> Row:
    shared = sorted(shared)  # a set has another order in each process, and a mean other last digits
    records = [by_arm[arm][key] for key in shared]
    resolved = resolved_of(_any(by_arm[arm]))
    whose = f"{resolved.get('peer', '')} {resolved.get('peer_version', '')}".strip() or "fp8core"
    package = ", ".join(" ".join(each) for each in resolved.get("extensions", {}).items())
    sqnr = [r[m] for r in records for m in SQNR if known(r.get(m)) and math.isfinite(r[m])]
    place: Row = {
        "arm": arm,
        "whose": Cell(
            f"{whose} (package {package}, not ours)" if package else whose, str(resolved.get("peer", ""))
        ),
        "cases": len(records),
        "sqnr_db": min(sqnr, default=math.nan),
        "mismatches": max((r["mismatches"] for r in records if known(r.get("mismatches"))), default=math.nan),
    }
    for name, cell, other in (
        ("against_ours", "against_ours_cell", ours),
        ("over_bf16", "over_bf16_cell", _root(arm, by_arm)),
    ):
        of = by_arm.get(other, {})
        ratios = [of[key]["value"] / by_arm[arm][key]["value"] for key in shared if key in of]
        mean = stats.geometric_mean(ratios).value if ratios else math.nan
        style = "" if not known(mean) or 0.99 <= mean <= 1.01 else "faster" if mean > 1 else "slower"
        place |= {name: mean, cell: Cell(text.ratio(mean), mean, style)}
    return place


def _any(records: Times) -> Record:
    return next(iter(records.values()))


def _shared(had: list[Times]) -> frozenset[tuple[str, str]]:
    """The cases that all of some arms have, each in the newest run that has them all."""
    newest = {case: (run, case) for run, case in had[0] if all((run, case) in other for other in had)}
    return frozenset(newest.values())


def _ours(suite: str, records: Times) -> str:
    """Our arm that does the same: of products and casts the baseline, else the one of the same recipe and mode."""
    row = _any(records)
    if suite in ("cast", "gemm"):
        return str(row["baseline"])
    return str(replace(arm_of(row), peer=""))


def _root(arm: str, by_arm: Mapping[str, Times]) -> str:
    """The baseline of an arm, or that baseline's own, until one has no FP8; of eager against compiled none is asked."""
    seen: set[str] = set()
    while arm in by_arm and arm not in seen:
        seen.add(arm)
        row = _any(by_arm[arm])
        base = str(row["baseline"])
        if arm_of(row).recipe in WITHOUT_FP8 or not base or base in seen:
            break
        arm = base
    return arm
