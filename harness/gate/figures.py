"""Figures: what speaks against a verdict on the figures that a user's command wrote, which no check of a result stands behind.

A median hides what a few samples do, and a time that falls may be work that was not done. So mean, 95th percentile and first
call of each round are compared by the test that a confirmation has to pass; and where one is worse beyond the tolerance, or the
figures themselves are odd, the unit is open.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.decide import UnitVerdict, p_above, spread_floor
from harness.gate.matching import log_ratios, rounds_of
from harness.store import stats
from harness.store.outside import parse

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Mapping, Sequence

    from harness.gate.policy import Policy
    from harness.gate.unit import Unit
    from harness.store.stats import Vector

SUITE = "pytest-benchmark"
WHOLE = "the whole command"  # what a wall time is of
SUSPICIOUS = 3.0  # times faster or slower: rarely a change, often another unit or other work
FEWER, LESS = 0.9, 0.8  # of the samples, and of the seconds that all of them took
STATISTICS: dict[str, Callable[[Vector], Any]] = {
    "mean": np.mean,
    "95th percentile": lambda x: np.quantile(x, 0.95),
    "first call": lambda x: x[0],
}


def doubt(timed: Sequence[Unit], policy: Policy, date: datetime.date, *, paired: bool) -> None:
    """Adds what speaks against a verdict; where that is not known of a regression, the unit is open."""
    units = [unit for unit in timed if unit.key.suite == SUITE]
    for unit, hidden in zip(units, _hidden(units, policy, paired=paired), strict=True):
        doubts = _odd(unit, policy, date) + hidden
        before, after = (
            f"{facts.get('unit', 's')}, {facts.get('better', 'lower')} is better"
            for facts in _stated_facts(unit)
        )
        if before != after:
            doubts = [f"the baseline's are {before}, the candidate's {after}"]
        unit.reason = "; ".join([unit.reason, *doubts])
        if doubts and (unit.verdict is not UnitVerdict.REGRESSED or before != after):
            unit.verdict, unit.in_doubt = UnitVerdict.INCONCLUSIVE, True
        elif unit.verdict is UnitVerdict.IMPROVED and _stated_facts(unit)[1].get("timed") == WHOLE:
            unit.found(UnitVerdict.OK, f"{unit.reason}; that the same work was done is not shown")


def _stated_facts(unit: Unit) -> list[Mapping[str, Any]]:
    return [parse(rows[0].resolved) for rows in unit.rows]


def _odd(unit: Unit, policy: Policy, date: datetime.date) -> list[str]:
    """What is odd about the figures of a unit."""
    found, allowed = [], policy.allowance(unit.fields)
    if abs(unit.decision.effect.log) >= math.log(SUSPICIOUS) and (allowed is None or allowed.until < date):
        found.append(f"{SUSPICIOUS:g} times or more is suspicious: another unit, or work not done")
    rounds = [
        [x for rows in side for x in rounds_of(rows).values()]
        for side in zip(unit.rows, unit.again, strict=True)
    ]
    counts, seconds = (
        [float(np.median([of(x) for x in side])) if side else math.nan for side in rounds]
        for of in (len, np.sum)
    )
    calls = [float(facts.get("iterations") or 1) for facts in _stated_facts(unit)]
    if counts[1] < FEWER * counts[0] and seconds[1] * calls[1] < LESS * seconds[0] * calls[0]:
        found.append(f"{counts[1]:g} samples a round in place of {counts[0]:g}, in less time: work not done")
    alike = [len(side) > 1 and np.unique(np.concatenate(side)).size == 1 for side in rounds]
    if alike == [False, True]:
        found.append("all samples of the candidate are equal, those of the baseline are not")
    return found


def _hidden(units: Sequence[Unit], policy: Policy, *, paired: bool) -> list[list[str]]:
    """What is worse beyond the tolerance than the medians tell, of each unit."""
    tried: list[tuple[int, str, Vector, float]] = []
    for place, unit in enumerate(units):
        if all(len(x) > 1 for rows in unit.rows for x in rounds_of(rows).values()):
            limit = (
                math.log1p(unit.rule.tolerance)
                + (0.0 if paired else math.log1p(policy.session_spread))
                + unit.tick
            )
            for name, of in STATISTICS.items():
                parts = (
                    log_ratios(*pair, by_number=paired, of=of)
                    for pair in (unit.rows, unit.again)
                    if all(pair)
                )
                tried.append((place, name, unit.worse * np.concatenate(list(parts)), limit))
    found: list[list[str]] = [[] for _ in units]
    if tried:
        quiet = spread_floor([logs for _, _, logs, _ in tried])
        adjusted = stats.holm([p_above(logs - limit, quiet) for _, _, logs, limit in tried])
        for (place, name, logs, _), p in zip(tried, adjusted, strict=True):
            if p <= policy.alpha_confirm:
                found[place].append(f"{name} {math.expm1(logs.mean()):+.1%}, which the median hides")
    return found
