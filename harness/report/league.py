"""League: fp8core beside the other implementations, each on what both measured: cast, product, layer, whole step.

Ranked together are only arms with the same cases: those that the arm, ours and bf16 all have a time of in one run. An
implementation that can do the easy half of the cases alone is set against ours and bf16 on that half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.report.numerics import SQNR
from harness.report.records import arm_records
from harness.report.table import Cell, Column, known, make_table, number
from harness.store import stats, text
from harness.store.arm import WITHOUT_FP8, arm_of
from harness.store.cause import Cause
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from harness.report.runs import Machine
    from harness.report.table import Record, Table

    Key = tuple[str, str]  # run and case
    Arms = Mapping[str, Mapping[Key, Record]]  # the times of each arm

LEVELS = {"cast": "cast", "gemm": "GEMM", "linear": "linear layer", "train": "training step"}


@dataclass(frozen=True, slots=True)
class Place:
    """An arm in the league of the arms that do the same.

    Attributes:
        cases: that the arm, ours and bf16 all have a time of; the figures are of these alone.
        extension: the packages with their versions that bring it; "" for a peer that the harness has itself.
        against_ours: our time over its time, geometric mean; above 1 it is faster.
        over_bf16: likewise of the bf16 baseline; of casts, of our eager one.
        sqnr_db: the worst of any case and result.
        mismatches: codes of casts that differ from the reference; NaN where none were counted.
    """

    level: str
    ours: str
    arm: str
    peer: str
    version: str
    extension: str
    cases: int
    against_ours: float
    over_bf16: float
    sqnr_db: float
    mismatches: float


def places(machine: Machine) -> list[Place]:
    """The arms of peers that have a time, each league with our arm among them on the same cases, the fastest first."""
    found: list[Place] = []
    for suite, level in LEVELS.items():
        if suite not in machine.suites:
            continue
        by_arm: dict[str, dict[Key, Record]] = {}
        for r in arm_records(machine, suite):
            if r["status"] == "ok" and r["regime"] in ("isolated", ""):
                by_arm.setdefault(r["arm"], {})[r["run_id"], r["case_id"]] = r
        leagues: dict[tuple[str, frozenset[Key]], list[str]] = {}
        for arm, records in by_arm.items():
            if _resolved(next(iter(records.values()))).get("peer"):
                ours = _ours(suite, records, by_arm)
                shared = _shared((arm, ours, _root(arm, by_arm)), by_arm)
                leagues.setdefault((ours, shared), []).append(arm)
        for (ours, shared), arms in leagues.items():
            all_arms = [*([ours] if ours in by_arm and shared else []), *arms]
            own = [_place(level, ours, arm, shared, by_arm) for arm in all_arms]
            found += sorted(own, key=lambda p: -p.against_ours if known(p.against_ours) else math.inf)
    return found


def league_table(machine: Machine) -> Table:
    """The places, and who is not there with the way to get it."""
    columns = [
        Column("level", "level"),
        Column("like our arm", "ours"),
        Column("arm", "arm"),
        Column("whose", _whose),
        number("cases", "cases", text.count),
        number(
            "our time / its time",
            lambda p: _ratio(p.against_ours),
            hint="above 1: it is faster than ours",
        ),
        number("over bf16", lambda p: _ratio(p.over_bf16), hint="of casts: over our eager one"),
        number("worst SQNR (dB)", "sqnr_db"),
        number("codes that differ", "mismatches", hint="from the reference cast"),
    ]
    absent = "; ".join(_absent(machine))
    caption = (
        "Geometric means over the cases that the arm, ours and bf16 all measured, in the same rounds; arms with other cases "
        "have a row of ours on those beside them. Every arm passed the same check."
    )
    caption += f" Not here: {absent}." if absent else ""
    return make_table(f"league-{machine.env_id}", columns, places(machine), caption)


def _place(level: str, ours: str, arm: str, shared: Iterable[Key], by_arm: Arms) -> Place:
    records = {key: by_arm[arm][key] for key in shared}
    resolved = _resolved(next(iter(by_arm[arm].values())))
    sqnr = [r[m] for r in records.values() for m in SQNR if known(r.get(m)) and math.isfinite(r[m])]
    wrong = [r["mismatches"] for r in records.values() if known(r.get("mismatches"))]
    return Place(
        level,
        ours,
        arm,
        str(resolved.get("peer", "")),
        str(resolved.get("peer_version", "")),
        ", ".join(" ".join(each) for each in resolved.get("extensions", {}).items()),
        len(records),
        _mean_ratio(by_arm.get(ours, {}), records),
        _mean_ratio(by_arm.get(_root(arm, by_arm), {}), records),
        min(sqnr, default=math.nan),
        max(wrong, default=math.nan),
    )


def _shared(arms: Iterable[str], by_arm: Arms) -> frozenset[Key]:
    """The cases that all of some arms have, each in the newest run that has them all; arms without any are passed over."""
    had = [by_arm[arm] for arm in arms if arm in by_arm]
    newest = {case: (run, case) for run, case in had[0] if all((run, case) in other for other in had)}
    return frozenset(newest.values())


def _ours(suite: str, records: Mapping[Key, Record], by_arm: Arms) -> str:
    """Our arm that does the same: of products and casts the baseline, else the one of the same recipe and mode."""
    if suite in ("cast", "gemm"):
        return str(next(iter(records.values()))["baseline"])
    own = replace(arm_of(next(iter(records.values()))), peer="")
    # Layers that alone are compiled stand in an eager step.
    return str(replace(own, mode="eager") if own.mode == "linears" and str(own) not in by_arm else own)


def _root(arm: str, by_arm: Arms) -> str:
    """The baseline of an arm, or that baseline's own, until one has no FP8; of eager against compiled none is asked."""
    seen = {arm}
    while arm in by_arm:
        row = next(iter(by_arm[arm].values()))
        base = str(row["baseline"])
        if arm_of(row).recipe in WITHOUT_FP8 or not base or base in seen:
            break
        arm = base
        seen.add(arm)
    return arm


def _mean_ratio(of: Mapping[Key, Record], over: Mapping[Key, Record]) -> float:
    shared = [of[key]["value"] / r["value"] for key, r in over.items() if key in of]
    return stats.geometric_mean(shared).value if shared else math.nan


def _absent(machine: Machine) -> list[str]:
    """Why peers have no time here, each reason once."""
    frame = machine.frame
    absent = frame[(frame["cause"] == Cause.MISSING) & frame["suite"].isin(LEVELS)]
    return list(dict.fromkeys(absent["reason"]))


def _whose(place: Place) -> Cell:
    whose = f"{place.peer} {place.version}".strip() or "fp8core"
    return Cell(f"{whose} (package {place.extension}, not ours)" if place.extension else whose, place.peer)


def _ratio(value: float) -> Cell:
    style = "" if not known(value) or 0.99 <= value <= 1.01 else "faster" if value > 1 else "slower"
    return Cell(text.ratio(value), value, style)


def _resolved(record: Record) -> Mapping[str, Any]:
    return parse(record["resolved"])
