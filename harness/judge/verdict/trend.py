"""Trend: whether the gap grows, and after how many steps it would meet the margin (gate L5)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.curves import ema, half_life
from harness.judge.verdict.result import (
    ALPHA,
    HORIZON,
    MARGIN,
    MIN_WINDOW,
    SEARCHED,
    GateResult,
    estimate,
    percent,
    too_little,
)
from harness.store import stats

if TYPE_CHECKING:
    from harness.judge.verdict.spike_events import Calm
    from harness.store.stats import Vector


def trend(calm: Calm, margin: float = MARGIN, start: float = 0.0) -> GateResult:
    """L5: can't tell where the smoothed gap grows with log(step) and would leave the margin at ten times the steps.

    A line is fitted within each seed and its intervals are taken over seeds: residuals of one smoothed curve are far
    from independent, so an interval of a single fit would be too narrow. The result always says after how many steps
    the upper bound of the extrapolated gap meets the margin. Only the upper side is judged: a candidate that is better
    and better diverges from its control, but does not train worse.

    Args:
        calm: candidate and control.
        margin: relative to the control's loss.
        start: the first step that ran in FP8, of a warm-up.
    """
    pairs = calm.pairs
    steps = pairs.steps
    half = steps >= max(steps[0] + (steps[-1] - steps[0]) / 2, start)
    missing = too_little(pairs, "L5")
    if not missing and half.sum() < MIN_WINDOW:
        said = f"{half.sum()} logged steps of the second half ran in FP8; {MIN_WINDOW} are the least"
        missing = GateResult("L5", "INCONCLUSIVE", said, seeds=len(pairs.seeds))
    missing = missing or calm.too_few_left("L5", half)
    if missing:
        return missing
    scale = pairs.control[:, half].mean()
    gap = ema(calm.gap, steps, half_life(pairs.length), from_zero=True)[:, half] / scale
    x = np.log(steps[half] - steps[0] + 1)
    centred = x - x.mean()
    means, slopes = gap.mean(axis=1), gap @ centred / (centred @ centred)
    low, high = stats.t_interval(slopes)
    projected = float((means + slopes * (x[-1] + math.log(HORIZON) - x.mean())).mean())
    is_growing = low > 0 and projected > margin
    # A control that comes back from a spike lets the gap rise from below 0: undecided, but no divergence.
    is_above = stats.t_interval(gap[:, -max(1, gap.shape[1] // 5) :].mean(axis=1))[0] > 0
    met = _margin_at(means, slopes, float(x[-1] - x.mean()), margin) * pairs.length
    when = "has met the margin" if met <= pairs.length else f"meets the margin after {met:,.0f} steps"
    if math.isinf(met):
        when = f"does not meet the margin within {SEARCHED:,.0f} times the steps of the run"
    raw = float(pairs.gap[:, half].mean() / scale)
    sentence = (
        f"slope {percent(slopes.mean())} of the loss per e-fold of steps (95 % interval {percent(low)} to "
        f"{percent(high)}); projected to {HORIZON:g} times the steps {percent(projected)} against {percent(margin)}; the "
        f"upper 95 % bound of the trend {when}"
        + (": diverging" if is_growing and is_above else ": rising from below 0" if is_growing else "")
        + calm.note(half, raw)
    )
    found = estimate("L5", "INCONCLUSIVE" if is_growing else "PASS", sentence, slopes, (low, high), margin)
    return replace(found, margin_at_step=met)


def _margin_at(means: Vector, slopes: Vector, end: float, margin: float) -> float:
    """After how many times the run the upper bound meets the margin: 1 where it has at the end, infinity beyond `SEARCHED`.

    Args:
        means: of the smoothed gap, by seed; the line's value at the mean of log(step).
        slopes: of that line, by seed.
        end: log(step) at the end of the run, from that mean.
        margin: relative to the loss.
    """
    times = stats.t_quantile(1 - ALPHA, means.size - 1) / math.sqrt(means.size)

    def bound(ahead: float) -> float:
        at = means + slopes * (end + ahead)
        return float(at.mean() + times * at.std(ddof=1))

    if bound(0.0) >= margin:
        return 1.0
    low, high = 0.0, math.log(SEARCHED)
    if bound(high) < margin:
        return math.inf
    # The bound is convex in log(step): from below the margin it crosses it once.
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if bound(middle) < margin else (low, middle)
    return math.exp(high)
