"""Sooner: steps and seconds to one loss, and to the end: ratios of a candidate over its base, with intervals.

A run may be worse at equal steps and sooner at equal loss. Values at which a grid of evaluations saw the target are too
late by up to one cell; with curves the crossing is interpolated. Where it is not, the variance of a cell is added:
coverage of 95 % intervals in reports/published/studies/loss-verdict-error-rates.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.course import ends, ways
from harness.store.stats import Effect, paired, t_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.judge.verdict.evidence import Evidence, LossRun
    from harness.store.stats import Vector, Welch

LEAST_DEGREES = 10.0  # where the cell's variance, which is known, makes up most


@dataclass(frozen=True, slots=True)
class Sooner:
    """Candidate over base: below 1 is sooner.

    Attributes:
        loss: the target, or the lowest loss that every run reaches.
        steps: steps to it; None where a run does not reach it.
        seconds: to the target where one was named, else to the last common step; None without times.
        to_loss: seconds to that loss.
        lines: the same in words.
    """

    loss: float
    steps: Effect | None
    seconds: Effect | None
    to_loss: Effect | None
    lines: tuple[str, ...] = ()


def sooner(of: Evidence, window: int = 1) -> Sooner:
    """How much sooner the candidate is.

    Args:
        of: the evidence; every run has losses.
        window: so many values of a run are averaged before a crossing is looked for.
    """
    curves = [_averaged(run, window) for run in of.runs]
    loss = of.target if of.target is not None else max(float(np.nanmin(values)) for _, values in curves)
    crossed = [crossing(steps, values, loss) for steps, values in curves]
    total = [run.second_at(of.end) for run in of.runs]
    to_loss = [run.second_at(step) for run, step in zip(of.runs, crossed, strict=True)]
    steps = _ratio(of, crossed)
    seconds = _ratio(of, total if of.target is None else to_loss)
    made = Sooner(loss, steps, seconds, _ratio(of, to_loss))
    return replace(made, lines=tuple(_lines(of, made, total, to_loss)))


def _lines(of: Evidence, made: Sooner, total: Sequence[float], to_loss: Sequence[float]) -> Iterator[str]:
    what = f"a loss of {made.loss:.4g}"
    if made.steps is None:
        yield f"steps to {what}: some runs do not reach it"
    else:
        yield f"steps to {what}: {made.steps}"
    if all(math.isnan(second) for second in total):
        return
    n, seconds = len(of.base), to_loss if of.target is not None else total
    end = what if of.target is not None else "the end"
    if made.seconds is None:
        yield f"time to {end}: some runs have none"
    else:
        yield f"time to {end}: {np.mean(seconds[:n]):.2f} and {np.mean(seconds[n:]):.2f} s, {made.seconds}"
    if of.target is None and made.to_loss is not None:
        yield f"time to {what}: {made.to_loss}"


def ratio_to_target(
    base: Sequence[float],
    candidate: Sequence[float],
    cell: float = 0.0,
    clusters: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Effect:
    """Samples or seconds to a target, candidate over base, of values that a grid of evaluations may have rounded up.

    Args:
        base: of each run, above 0.
        candidate: the same.
        cell: the distance of two evaluations, in the same unit; 0 where crossings are exact.
        clusters: of each run, the cluster; the wider interval counts.

    Returns:
        The ratio of geometric means, with its 95 % interval; with fewer than two values a side without one.
    """
    logs = np.log(base), np.log(candidate)
    rounds = min(map(len, logs))
    middle = float(logs[1].mean() - logs[0].mean())
    if rounds < 2:
        return Effect(middle, -math.inf, math.inf, rounds)
    share = cell / math.exp(float(np.concatenate(logs).mean()))
    lows, highs = zip(*(_interval(way, share) for way in ways(*logs, clusters)), strict=True)
    return Effect(middle, min(lows), max(highs), rounds)


def _interval(found: Welch, share: float) -> tuple[float, float]:
    """Interval of a difference of logs; a cell, as a share of the samples, adds share^2 / 24, which is known, to its squared error."""
    variance, degrees = found.error**2 + share**2 / 24, found.degrees
    if share:
        own = (
            degrees * (variance / found.error**2) ** 2 if found.error else math.inf
        )  # Welch and Satterthwaite
        degrees = min(max(degrees, LEAST_DEGREES), own)  # few clusters far apart keep their few degrees
    half = t_quantile(0.975, degrees) * math.sqrt(variance)
    return found.difference - half, found.difference + half


def _ratio(of: Evidence, figures: Sequence[float]) -> Effect | None:
    """None where a run has no figure above 0."""
    n = len(of.base)
    if of.paired:
        return ratio_of_pairs(figures[:n], figures[n:])
    known = all(0 < x < math.inf for x in figures)
    return ratio_to_target(figures[:n], figures[n:], clusters=of.clusters) if known else None


def ratio_of_pairs(base: Sequence[float], candidate: Sequence[float]) -> Effect | None:
    """Candidate over base, pair by pair; None where one has no figure above 0."""
    known = all(0 < x < math.inf for x in (*base, *candidate))
    return paired(np.log(candidate) - np.log(base)) if known else None


def _averaged(run: LossRun, window: int) -> tuple[Vector, Vector]:
    """(steps, losses), each the end of a window of so many values; as they are for 1."""
    good = ~run.broken
    steps, values = run.steps[good], run.values[good]
    if window <= 1 or values.size < 2 * window:
        return steps, values
    rows = np.lib.stride_tricks.sliding_window_view(values, window)[:: max(1, window // 4)]
    return steps[window - 1 :][:: max(1, window // 4)], ends(rows, window)


def crossing(steps: Vector, values: Vector, target: float) -> float:
    """The step at which a curve first is at or below the target, interpolated; NaN if it never is.

    >>> crossing(np.array([0.0, 10.0, 20.0]), np.array([3.0, 2.0, 1.0]), 1.5)
    15.0
    """
    below = np.flatnonzero(values <= target)
    if not below.size:
        return math.nan
    i = int(below[0])
    if i == 0:
        return float(steps[0])
    high, low = values[i - 1], values[i]
    share = (high - target) / (high - low) if math.isfinite(high) else 1.0
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))
