"""Cause: what a slowdown is made of, from what the two rows say about themselves.

| cause | evidence |
|---|---|
| control | the fixed product of the control case moved with it: the machine, not the code |
| clock | the time grew and the cycles (time x SM clock, round by round) did not |
| compile | the metric is a compile time, or more graphs, graph breaks or recompiles than before |
| host | more operators are called, or more samples waited for the host than before |
| kernel | none of these: the same calls take more cycles |
| (none given) | neither calls nor cycles were counted |

Only a GPU row carries a clock; on a CPU a slow clock shows in the control case alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.judged_metric import OPERATORS as CALLS
from harness.gate.judged_metric import facts_of
from harness.store import stats
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.gate.judged_metric import Unit
    from harness.store.stats import Vector

COMPILE_FACTS = ("compile_graphs", "compile_graph_breaks", "recompiles")
# A share of samples that waited for the host which grew by this much is no accident of one block.
LATE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Cause:
    """One word and what speaks for it."""

    name: str
    evidence: str


def cause_of(unit: Unit, change: float, control: float) -> Cause | None:
    """Why a timed unit became slower; None where no row says anything about it.

    Args:
        unit: a unit with its rows.
        change: its mean log ratio, positive = slower.
        control: the control case's mean log ratio; NaN where there is none.
    """
    before, after = unit.rows
    if not before or not after:
        return None
    if not math.isnan(control) and change > 0 and control >= change / 2:
        return Cause("control", f"the control case is {_percent(control)} slower too")
    cycles = cycle_ratio(before, after)
    if cycles is not None and change > 0 and cycles < change / 2:
        return Cause("clock", f"time {_percent(change)}, cycles {_percent(cycles)}, so the clock fell")
    counted = "" if cycles is None else f"; cycles {_percent(cycles)}"
    if unit.metric == "compile_s":
        return Cause("compile", f"compile time {_percent(change)}")
    old, new = facts_of(before[0]), facts_of(after[0])
    for name in COMPILE_FACTS:
        if _more(old, new, name):
            return Cause("compile", f"{name} {old[name]} -> {new[name]}")
    if _more(old, new, CALLS):
        return Cause("host", f"operators called {old[CALLS]} -> {new[CALLS]}{counted}")
    late = _late(after) - _late(before)
    if unit.metric == "launch_us":
        return Cause("host", f"launching kernels takes longer{counted}")
    if late > LATE_SHARE:
        return Cause("host", f"{late:.0%} more samples waited for the host{counted}")
    known = CALLS in old and CALLS in new
    if not known and cycles is None:
        return None  # nothing was counted, so nothing speaks for the kernel
    same = "the same operators were called" if known else "calls were not counted"
    kernels = ""
    if old.get("kernels") != new.get("kernels"):
        kernels = "; other kernels ran"
    return Cause("kernel", same + counted + kernels)


def cycle_ratio(before: list[Any], after: list[Any]) -> float | None:
    """Mean over rounds of log(cycles after / cycles before); None where a clock was not read for every sample."""
    logs: list[Vector] = []
    for a, b in zip(before, after, strict=False):
        if not (_clocked(a) and _clocked(b)) or not set(a.rounds) & set(b.rounds):
            return None
        cycles = [np.asarray(r.samples) * np.asarray(r.sample_clock_mhz) for r in (a, b)]
        logs.append(stats.paired_log_ratios(cycles[0], a.rounds, cycles[1], b.rounds))
    return float(np.concatenate(logs).mean()) if logs else None


def _clocked(row: Any) -> bool:
    clocks = np.asarray(row.sample_clock_mhz if row.sample_clock_mhz is not None else [], dtype=np.float64)
    return (
        clocks.size == len(row.samples) > 0 and bool(np.isfinite(clocks).all()) and bool((clocks > 0).all())
    )


def _more(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> bool:
    a, b = old.get(name), new.get(name)
    return isinstance(a, int | float) and isinstance(b, int | float) and b > a


def _late(rows: list[Any]) -> float:
    """Share of samples that could not be queued before the device reached them."""
    late = count = 0.0
    for row in rows:
        late += float(parse(row.timing).get("late_samples") or 0)
        count += len(row.samples)
    return late / count if count else 0.0


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(log_ratio):+.1%}"
