"""Heat maps: the speedup over bf16 by M, K and N, as tables whose cells are coloured and say their number.

D = A @ B with A [M, K] and B [K, N]; a table for each arm and M, a row for each K, a column for each N.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING

from harness.report.drawing import evenly
from harness.report.table import Cell, Column, Grid, Table, make_table, number
from harness.report.verdicts import fp8_pairs
from harness.store import stats, text
from harness.store.arm import baseline_of
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from harness.report.runs import Machine

EDGES = (
    0.67,
    0.8,
    0.91,
    0.97,
    1.03,
    1.1,
    1.25,
    1.5,
)  # between the nine colours; the middle one is "the same"
MOST_ARMS, MOST_M, MOST_SIDE = 3, 4, 12


def heat_maps(machine: Machine, suite: str) -> list[Grid]:
    """Maps of a suite whose cases have M, K and N, isolated regime; none where a single shape was measured.

    The arms with the largest gain are drawn, compiled ones where there are any, and sizes spread evenly where there
    are too many to draw: the tables of the suite have all.
    """
    pairs = fp8_pairs(machine)
    pairs = pairs[(pairs["suite"] == suite) & (pairs["regime"] == "isolated") & pairs["speedup"].notna()]
    cells: dict[str, dict[tuple[int, int, int], list[float]]] = {}
    for r in rows_of(_as_trained(pairs)):
        axes = text.axes_of(r["axes"])
        m, k, n = (axes.get(name) for name in text.SIZES)
        if isinstance(m, int) and isinstance(k, int) and isinstance(n, int):
            cells.setdefault(r["arm"], {}).setdefault((m, k, n), []).append(r["speedup"])
    if len({sizes for own in cells.values() for sizes in own}) < 2:
        return []
    gain = {
        arm: {sizes: stats.geometric_mean(v).value for sizes, v in own.items()} for arm, own in cells.items()
    }
    arms = sorted(gain, key=lambda arm: -stats.geometric_mean(list(gain[arm].values())).value)[:MOST_ARMS]
    every_m, every_k, every_n = (_spread({sizes[i] for arm in arms for sizes in gain[arm]}, most)
                                 for i, most in enumerate((MOST_M, MOST_SIDE, MOST_SIDE)))  # fmt: skip
    maps = []
    for arm in arms:
        for m in every_m:
            own = {(k, n): v for (at, k, n), v in gain[arm].items() if at == m}
            ks, ns = (
                [s for s in sides if any(key[i] == s for key in own)]
                for i, sides in enumerate((every_k, every_n))
            )
            if ks and ns:
                key = f"map-{suite}-{arm}-{m}-{machine.env_id}"
                maps.append(Grid(f"M = {m}", _map(key, own, ks, ns), arm))
    return maps


def _map(key: str, gain: dict[tuple[int, int], float], ks: Sequence[int], ns: Sequence[int]) -> Table:
    columns = [
        Column("K \\ N", lambda k: Cell(str(k), k)),
        *(number(str(n), partial(_cell, gain, n)) for n in ns),
    ]
    return make_table(key, columns, ks, sortable=False)


def _cell(gain: Mapping[tuple[int, int], float], n: int, k: int) -> Cell:
    speedup = gain.get((k, n))
    if speedup is None:
        return Cell("", None)
    return Cell(text.number(speedup), speedup, f"h{bisect.bisect(EDGES, speedup)}")


def _as_trained(pairs: pd.DataFrame) -> pd.DataFrame:
    """The compiled arms, since that is how models are trained; all where none was compiled."""
    compiled = pairs[[baseline_of(r).mode == "compile" for r in rows_of(pairs)]]
    return compiled if len(compiled) else pairs


def _spread(values: set[int], most: int) -> list[int]:
    """The values in order, or so many of them, evenly spaced, the ends among them."""
    ordered = sorted(values)
    return [ordered[i] for i in evenly(len(ordered), most)]
