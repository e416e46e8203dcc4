"""Conditions: under which times were taken, and what the policy lets them decide.

Throttling excludes a unit where it struck one side alone: products limited by power are throttled on both sides of every
round, and are compared. A row says whether the device was throttled while it was timed and whether another process computed there; each sample of
a GPU row carries the SM clock. Nothing is dropped: a unit that the policy excludes stays, undecided and with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.gate.judged_metric import Unit
    from harness.gate.policy import Policy

WORDS = {
    "contended": "beside another process on the device",
    "throttled": "while the device was throttled",
}
SIDES = ("baseline", "candidate")


def mark_conditions(units: Sequence[Unit], policy: Policy) -> list[str]:
    """Marks the timed units that were measured under a condition; returns what is to be told of all."""
    counts: dict[str, int] = {}
    strayed = 0
    for unit in units:
        for name in WORDS:
            counts[name] = counts.get(name, 0) + any(_struck(unit.rows, name))
        unit.excluded = excluded_by(unit.rows, policy)
        unit.strayed = sum(stray_samples(row, policy.clock_stray) for rows in unit.rows for row in rows)
        strayed += unit.strayed
    notes = [f"{count} times were measured {WORDS[name]}" for name, count in counts.items() if count]
    if excluded := sum(bool(unit.excluded) for unit in units):
        notes.append(f"{excluded} times decide nothing, by exclude in the policy")
    if strayed:
        notes.append(
            f"{strayed} samples were taken at a clock more than {policy.clock_stray:.0%} from the median of their round"
        )
    return notes


def excluded_by(sides: tuple[list[Any], list[Any]], policy: Policy) -> str:
    """Why the policy lets the times of these rows decide nothing; "" where it does not."""
    for name, words in WORDS.items():
        struck = _struck(sides, name)
        if name in policy.exclude and any(struck) and (name != "throttled" or not all(struck)):
            which = " and the ".join(side for side, hit in zip(SIDES, struck, strict=True) if hit)
            alone = " and the other side was not" if name == "throttled" else ""
            return f"the {which} was measured {words}{alone}; measure again, or see exclude in the policy"
    return ""


def _struck(sides: tuple[list[Any], list[Any]], name: str) -> list[bool]:
    return [any(parse(row.timing).get(name) for row in rows) for rows in sides]


def stray_samples(row: Any, share: float) -> int:
    """Samples of a row whose SM clock is further than a share from the median clock of their round."""
    clocks = np.asarray(row.sample_clock_mhz if row.sample_clock_mhz is not None else [], dtype=np.float64)
    rounds = np.asarray(row.rounds)
    if not clocks.size or clocks.size != rounds.size:
        return 0
    count = 0
    for number in np.unique(rounds):
        these = clocks[rounds == number]
        these = these[np.isfinite(these)]
        if these.size:
            middle = float(np.median(these))
            count += int(np.count_nonzero(np.abs(these - middle) > share * middle))
    return count
