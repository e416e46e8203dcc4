"""Bounds: how far a loss of ranks may lie from the same loss of one process.

Where all sums are of the same terms in the same order, but for exchanging two of them, floating point gives the same
bits: the bound is 0. Elsewhere it is what rounding alone does: one process runs again with each weight moved by up to one
unit in its last place, `DRAWS` times, and the bound is `MARGIN` times the largest relative change of a loss, at least
`MARGIN` units in the last place. FP8 makes that change large, since a code that flips is a step of 2^-4: about 1e-3 after
three steps, where training itself moves the loss by 20 %.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from harness.machine import ranks
from harness.training.parallel.job import ULP, alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.training.parallel.job import ParallelRun

MARGIN, DRAWS = 4.0, 3
ROUNDING = (
    f"{MARGIN:g} x the largest change of one process's own losses when each weight moves by up to one unit in its last "
    f"place, {DRAWS} draws"
)
SAME = "the same sums in the same order: bit for bit"


@lru_cache(maxsize=64)
def reference(job: ParallelRun) -> tuple[float, ...]:
    """The losses of one process."""
    return _several((job,))[0]


@lru_cache(maxsize=64)
def rounding(job: ParallelRun) -> float:
    """The bound where sums differ in their order."""
    moved = _several(tuple(replace(job, perturb=draw) for draw in range(1, DRAWS + 1)))
    return MARGIN * max([ULP, *(deviation(losses, reference(job)) for losses in moved)])


def alone_each(jobs: Sequence[ParallelRun]) -> list[list[float]]:
    """What a rank of its own does: one job after the other."""
    return [alone(job) for job in jobs]


def _several(jobs: tuple[ParallelRun, ...]) -> list[tuple[float, ...]]:
    (curves,) = ranks.run(alone_each, 1, jobs, device=jobs[0].device)
    return [tuple(losses) for losses in curves]


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest |loss - expected| over |expected|; nan where a loss is."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return float("nan") if any(x != x for x in apart) else max(apart)
