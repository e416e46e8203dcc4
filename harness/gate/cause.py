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
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.matching import OPERATORS, clocks_of, number
from harness.gate.unit import Cause
from harness.store import stats
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.gate.unit import Unit

COMPILE_FACTS = ("compile_graphs", "compile_graph_breaks", "recompiles")
# A share of samples that waited for the host which grew by this much is no accident of one block.
LATE_SHARE = 0.05


def cause_of(unit: Unit, change: float, control: float) -> Cause | None:
    """Why a timed unit became slower; None where no row says anything about it.

    Args:
        unit: a unit with its rows.
        change: its mean log ratio, positive = slower.
        control: the control case's mean log ratio; NaN where there is none.
    """
    before, after = unit.rows
    if change > 0 and control >= change / 2:
        return Cause("control", f"the control case is {_percent(control)} slower too")
    cycles = cycle_ratio(before, after)
    if cycles is not None and change > 0 and cycles < change / 2:
        return Cause("clock", f"time {_percent(change)}, cycles {_percent(cycles)}, so the clock fell")
    counted = "" if cycles is None else f"; cycles {_percent(cycles)}"
    if unit.key.metric == "compile_s":
        return Cause("compile", f"compile time {_percent(change)}")
    old, new = (parse(rows[0].resolved) for rows in unit.rows)
    counts = {name: (number(old.get(name)), number(new.get(name))) for name in (*COMPILE_FACTS, OPERATORS)}
    for name, (was, now) in counts.items():
        if now > was and name == OPERATORS:
            return Cause("host", f"operators called {was:g} -> {now:g}{counted}")
        if now > was:
            return Cause("compile", f"{name} {was:g} -> {now:g}")
    if unit.key.metric == "launch_us":
        return Cause("host", f"launching kernels takes longer{counted}")
    if (late := _late(after) - _late(before)) > LATE_SHARE:
        return Cause("host", f"{late:.0%} more samples waited for the host{counted}")
    known = not any(map(math.isnan, counts[OPERATORS]))
    if not known and cycles is None:
        return None  # nothing was counted, so nothing speaks for the kernel
    same = "the same operators were called" if known else "calls were not counted"
    others = "; other kernels ran" if old.get("kernels") != new.get("kernels") else ""
    return Cause("kernel", same + counted + others)


def cycle_ratio(before: Sequence[Any], after: Sequence[Any]) -> float | None:
    """Mean over rounds of log(cycles after / cycles before); None where a clock was not read for every sample."""
    logs = []
    for pair in zip(before, after, strict=False):
        clocks = [clocks_of(row) for row in pair]
        if not all(c.size and (c > 0).all() and np.isfinite(c).all() for c in clocks):
            return None
        if not set(pair[0].rounds) & set(pair[1].rounds):
            return None
        cycles = [(np.asarray(r.samples) * c, r.rounds) for r, c in zip(pair, clocks, strict=True)]
        logs.append(stats.paired_log_ratios(*cycles[0], *cycles[1]))
    return float(np.concatenate(logs).mean()) if logs else None


def _late(rows: Sequence[Any]) -> float:
    """Share of samples that could not be queued before the device reached them."""
    late = sum(float(parse(row.timing).get("late_samples") or 0) for row in rows)
    return late / max(sum(len(row.samples) for row in rows), 1)


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(log_ratio):+.1%}"
