"""Gates on the paired loss gap: early window, late window, held-out loss, trend (L3 to L5).

The late loss alone passes five of eight gross faults, because the optimiser absorbs them; so no gate stands for
another. Gaps are candidate minus control of the same seed, relative to the control's mean loss. All tests have two
sides: truncation instead of rounding makes the early loss better.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.curves import ema, half_life
from harness.judge.verdict.result import (
    ALPHA,
    EARLY_MAX,
    EARLY_MEAN,
    EARLY_SHARE,
    EARLY_STEPS,
    FAIL_TIMES,
    HORIZON,
    LATE,
    MARGIN,
    MIN_GOLDEN,
    MIN_SEEDS,
    GateResult,
    Status,
    estimate,
    largest_sd,
    percent,
    too_little,
)
from harness.store import stats

if TYPE_CHECKING:
    from harness.judge.verdict.curves import Pairs
    from harness.store.stats import Vector

Span = tuple[float, float]  # first step, and the first one after it
WHOLE: Span = (0.0, math.inf)


def early_window(pairs: Pairs, golden: Pairs | None = None, span: Span = WHOLE) -> GateResult:
    """L3: mean gap and largest smoothed gap early on, in the band that the golden emulation spans.

    Args:
        pairs: candidate and control.
        golden: the golden emulation of the same recipe and the control; None: fixed limits stand in. With fewer than
            `MIN_GOLDEN` seeds their band is so wide that beyond it nobody can tell: at 3 seeds it is 11.5 sd, and FAIL
            needs 46.
        span: the steps in which the precisions differ; the window starts with it and ends within.
    """
    missing = too_little(pairs, "L3")
    if missing:
        return missing
    window = _early_window(pairs, span)
    if not window.size:
        return GateResult("L3", "INCONCLUSIVE", "no logged step ran in FP8", seeds=len(pairs.seeds))
    means, peaks = _early_figures(pairs, window)
    limits = ((-EARLY_MEAN, EARLY_MEAN), (-EARLY_MAX, EARLY_MAX))
    wide = ((-EARLY_MEAN * FAIL_TIMES, EARLY_MEAN * FAIL_TIMES), (-1.0, EARLY_MAX * FAIL_TIMES))
    source = "fixed band, no golden arm"
    own = None
    if golden is not None and len(golden.seeds) >= MIN_SEEDS:
        own = _early_figures(golden, window)
        limits = (_prediction(own[0], 1.0), _prediction(own[1], 1.0))
        wide = (_prediction(own[0], FAIL_TIMES), _prediction(own[1], FAIL_TIMES))
        source = f"band of {len(golden.seeds)} golden runs"
    # A smoothed gap's size has no lower limit: less than the golden arm's is no fault.
    beyond = (
        means.min() < limits[0][0] or means.max() > limits[0][1] or peaks.max() > limits[1][1],
        means.min() < wide[0][0] or means.max() > wide[0][1] or peaks.max() > wide[1][1],
    )
    status: Status = "FAIL" if beyond[1] else "WARN" if beyond[0] else "PASS"
    if own is not None and own[0].size < MIN_GOLDEN and status == "WARN":
        status = "INCONCLUSIVE"
        source += f", too few of {MIN_GOLDEN} to tell a fault from the recipe's own effect"
    low, high = stats.t_interval(means)
    sentence = (
        f"steps {int(window[0])} to {int(window[-1])}: mean gap {percent(means.mean())}, worst seed "
        f"{percent(means[np.abs(means).argmax()])} against {percent(limits[0][0])} to {percent(limits[0][1])}; largest "
        f"smoothed gap {percent(peaks.max())} against {percent(limits[1][1])} ({source}; FAIL beyond {FAIL_TIMES:g} bands)"
    )
    margin = max(abs(limits[0][0]), abs(limits[0][1]))
    return estimate("L3", status, sentence, means, (low, high), margin)


def late_window(pairs: Pairs, margin: float = MARGIN) -> GateResult:
    """L4: mean loss of the last fifth of the steps, equivalent within the margin (two one-sided tests)."""
    missing = too_little(pairs, "L4")
    if missing:
        return missing
    return _equivalence("L4", f"last {100 * LATE:.0f} % of the steps", late_gaps(pairs), margin)


def late_gaps(pairs: Pairs) -> Vector:
    """By seed: mean gap of the last fifth of the steps, relative to the control's mean loss there."""
    if not pairs.seeds:
        return np.zeros(0)
    late = pairs.steps >= pairs.steps[-1] - LATE * (pairs.steps[-1] - pairs.steps[0])
    return np.asarray(pairs.gap[:, late].mean(axis=1) / pairs.control[:, late].mean(), np.float64)


def heldout(pairs: Pairs, margin: float = MARGIN) -> GateResult:
    """L4, its other half: the final loss on the fixed held-out windows, by the same test."""
    missing = too_little(pairs, "L4h")
    if missing:
        return missing
    gaps = heldout_gaps(pairs)
    if gaps is None:
        said = "no held-out loss after the same step in every run"
        return GateResult("L4h", "INCONCLUSIVE", said, seeds=len(pairs.seeds))
    return _equivalence("L4h", "held-out loss", gaps, margin)


def heldout_gaps(pairs: Pairs) -> Vector | None:
    """By seed: gap of the final held-out loss, relative to the control's mean; None where some run has no such loss."""
    if pairs.heldout is None:
        return None
    mine, theirs = pairs.heldout
    return np.asarray((mine - theirs) / theirs.mean(), np.float64)


def trend(pairs: Pairs, margin: float = MARGIN) -> GateResult:
    """L5: a smoothed gap that grows with log(step) and would leave the margin at ten times the steps is a warning.

    The slope is fitted within each seed and its interval taken over seeds: residuals of one smoothed curve are far
    from independent, so an interval of a single fit would be too narrow.
    """
    missing = too_little(pairs, "L5")
    if missing:
        return missing
    steps = pairs.steps
    half = steps >= steps[0] + (steps[-1] - steps[0]) / 2
    scale = pairs.control[:, half].mean()
    gap = ema(pairs.gap, steps, half_life(pairs.length), from_zero=True)[:, half] / scale
    x = np.log(steps[half] - steps[0] + 1)
    centred = x - x.mean()
    slopes = gap @ centred / (centred @ centred)
    low, high = stats.t_interval(slopes)
    projected = float((gap.mean(axis=1) + slopes * (x[-1] + math.log(HORIZON) - x.mean())).mean())
    growing = low > 0 and projected > margin
    sentence = (
        f"slope {percent(slopes.mean())} of the loss per e-fold of steps (95 % interval {percent(low)} to "
        f"{percent(high)}); projected to {HORIZON:g} times the steps {percent(projected)} against {percent(margin)}"
        + (": diverging" if growing else "")
    )
    return estimate("L5", "WARN" if growing else "PASS", sentence, slopes, (low, high), margin)


def _equivalence(gate: str, what: str, gaps: Vector, margin: float) -> GateResult:
    """Two one-sided tests at `ALPHA`: the 90 % interval inside the margin, wholly outside of it, or neither.

    A PASS needs power as well (`largest_sd`). Without it an interval that happens to be narrow proves little.
    """
    low, high = stats.t_interval(gaps, 1 - 2 * ALPHA)
    sd = float(gaps.std(ddof=1))
    allowed = largest_sd(margin, gaps.size)
    status: Status = "INCONCLUSIVE"
    why = "the interval crosses the margin"
    if low > margin or high < -margin:
        status, why = "FAIL", "wholly outside the margin"
    elif -margin < low and high < margin:
        status, why = "PASS", "inside the margin"
        if sd > allowed:
            status, why = (
                "INCONCLUSIVE",
                f"inside the margin, but sd above {percent(allowed)[1:]} has no power",
            )
    sentence = (
        f"{what}: mean gap {percent(gaps.mean())} (90 % interval {percent(low)} to {percent(high)}), margin "
        f"{percent(margin)[1:]}, sd {percent(sd)[1:]}, {gaps.size} seeds: {why}"
    )
    return estimate(gate, status, sentence, gaps, (low, high), margin)


def _early_window(pairs: Pairs, span: Span) -> Vector:
    """Logged steps of the early window: a third of the run, at most 1,000 steps, from the start of the span on."""
    steps = pairs.steps
    start = max(span[0], steps[0])
    stop = min(start + min(EARLY_STEPS, EARLY_SHARE * pairs.length), span[1])
    return steps[(steps >= start) & (steps < stop)]


def _early_figures(pairs: Pairs, window: Vector) -> tuple[Vector, Vector]:
    """By seed: mean gap over the early window, and the largest smoothed gap in it, both relative to the loss."""
    steps = pairs.steps
    inside = (steps >= window[0]) & (steps <= window[-1])
    life = half_life(pairs.length)
    smooth_gap = np.abs(ema(pairs.gap, steps, life, from_zero=True)[:, inside])
    smooth_loss = ema(pairs.control, steps, life)[:, inside]
    means = pairs.gap[:, inside].mean(axis=1) / pairs.control[:, inside].mean(axis=1)
    return means, (smooth_gap / smooth_loss).max(axis=1)


def _prediction(values: Vector, times: float) -> tuple[float, float]:
    """99 % prediction interval of one more value, its half-width multiplied."""
    low, high = stats.prediction_interval(values, 0.99)
    centre, half = (low + high) / 2, (high - low) / 2
    return centre - times * half, centre + times * half
