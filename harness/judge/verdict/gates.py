"""Gates on the paired loss gap: early window, late window, held-out loss (L3, L4).

The late loss alone passes five of eight gross faults, because the optimiser absorbs them; so no gate stands for
another. Gaps are candidate minus control of the same seed, relative to the control's mean loss. These tests have two
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
    FAIL_CONFIDENCE,
    FAIL_TIMES,
    LATE,
    MARGIN,
    MIN_GOLDEN,
    MIN_POINTS,
    MIN_SEEDS,
    MIN_WINDOW,
    MOST_OF_GOLDEN,
    MOST_SEEDS,
    STRAY,
    STRAY_MARGINS,
    GateResult,
    Status,
    estimate,
    percent,
    too_little,
)
from harness.store import stats

if TYPE_CHECKING:
    from harness.judge.verdict.curves import Pairs
    from harness.judge.verdict.spike_events import Calm, Mask
    from harness.store.stats import Vector

Span = tuple[float, float]  # first step, and the first one after it
WHOLE: Span = (0.0, math.inf)


def early_window(calm: Calm, golden: Calm | None = None, span: Span = WHOLE) -> GateResult:
    """L3: mean gap and largest smoothed gap early on, in the band that the golden emulation spans.

    WARN looks at the worst seed. FAIL needs three quarters of the seeds beyond the widest band on one side: the worst of
    many correct seeds is far out, so that a limit for it would fail the more correct arms the more seeds they have.
    Where more than `STRAY` of the seeds lie beyond that band, the gate can't tell.

    Args:
        calm: candidate and control.
        golden: the golden emulation of the same recipe and the control; None: fixed limits stand in. With fewer than
            `MIN_GOLDEN` seeds their band is so wide that beyond it nobody can tell: at 3 seeds it is 11.5 sd, and FAIL
            needs 46.
        span: the steps in which the precisions differ; the window starts with it and ends within.
    """
    pairs = calm.pairs
    missing = too_little(pairs, "L3")
    if missing:
        return missing
    in_fp8 = int(((pairs.steps >= span[0]) & (pairs.steps < span[1])).sum())
    if in_fp8 < MIN_POINTS:
        said = f"{in_fp8} logged steps ran in FP8; fewer than {MIN_POINTS} can't be judged"
        return GateResult("L3", "INCONCLUSIVE", said, seeds=len(pairs.seeds))
    inside = _early_window(pairs, span)
    missing = calm.too_few_left("L3", inside)
    if missing:
        return missing
    means, peaks = _early_figures(calm, inside)
    mean_band, peak_band = (-EARLY_MEAN, EARLY_MEAN), (-math.inf, EARLY_MAX)
    mean_wide, peak_wide = (
        (-EARLY_MEAN * FAIL_TIMES, EARLY_MEAN * FAIL_TIMES),
        (-math.inf, EARLY_MAX * FAIL_TIMES),
    )
    source = "fixed band, no golden arm"
    golden_seeds = len(golden.pairs.seeds) if golden is not None else 0
    if golden is not None and golden_seeds >= MIN_SEEDS:
        golden_means, golden_peaks = _early_figures(golden, inside)
        # A golden arm that is itself far from the control, or whose seeds scatter, is no measure: its band has a limit.
        mean_band, mean_wide = (
            _within(_prediction(golden_means, times), capped * EARLY_MEAN * FAIL_TIMES)
            for times, capped in ((1.0, 1.0), (FAIL_TIMES, MOST_OF_GOLDEN))
        )
        # A smoothed gap's size has no lower limit: less than the golden arm's is no fault.
        peak_band, peak_wide = (
            (-math.inf, min(_prediction(golden_peaks, times)[1], capped * EARLY_MAX * FAIL_TIMES))
            for times, capped in ((1.0, 1.0), (FAIL_TIMES, MOST_OF_GOLDEN))
        )
        source = f"band of {golden_seeds} golden runs"
    stray = _beyond(means, mean_wide) | _beyond(peaks, peak_wide)
    one_sided = max((stray & (means > 0)).mean(), (stray & (means < 0)).mean())
    status: Status = "PASS"
    if stray.any():
        source += f", {stray.sum()} of {stray.size} seeds are beyond {FAIL_TIMES:g} bands"
    if one_sided >= MOST_SEEDS:
        status = "FAIL"
        if means.mean() < 0 and calm.bursts[1].any():
            status = "INCONCLUSIVE"
            source += ", on the better side, and the control spikes"
    elif stray.mean() > STRAY:
        status = "INCONCLUSIVE"
    elif (_beyond(means, mean_band) | _beyond(peaks, peak_band)).any():
        status = "WARN"
        if MIN_SEEDS <= golden_seeds < MIN_GOLDEN:
            status = "INCONCLUSIVE"
            source += f", too few of {MIN_GOLDEN} to tell a fault from the recipe's own effect"
    raw = float((pairs.gap[:, inside].mean(axis=1) / pairs.control[:, inside].mean(axis=1)).mean())
    first, last = pairs.steps[inside][[0, -1]]
    sentence = (
        f"steps {int(first)} to {int(last)}: mean gap {percent(means.mean())}, worst seed "
        f"{percent(means[np.abs(means).argmax()])} against {percent(mean_band[0])} to {percent(mean_band[1])}; largest "
        f"smoothed gap {percent(peaks.max())} against {percent(peak_band[1])} ({source}; FAIL where "
        f"{100 * MOST_SEEDS:g} % of the seeds are beyond {FAIL_TIMES:g} bands){calm.note(inside, raw)}"
    )
    margin = max(abs(mean_band[0]), abs(mean_band[1]))
    return estimate("L3", status, sentence, means, stats.t_interval(means), margin)


def late_window(calm: Calm, margin: float = MARGIN, start: float = 0.0) -> GateResult:
    """L4: mean loss of the last fifth of the steps, equivalent within the margin (two one-sided tests).

    Args:
        calm: candidate and control.
        margin: of equivalence, relative to the control's mean loss.
        start: the first step that ran in FP8, of a warm-up; earlier ones are left out of the window.
    """
    inside = _late_window(calm.pairs, start)
    missing = too_little(calm.pairs, "L4")
    if not missing and inside.sum() < MIN_WINDOW:
        said = f"{inside.sum()} logged steps of the last {100 * LATE:.0f} % ran in FP8; {MIN_WINDOW} are the least"
        missing = GateResult("L4", "INCONCLUSIVE", said, seeds=len(calm.pairs.seeds))
    missing = missing or calm.too_few_left("L4", inside)
    if missing:
        return missing
    raw = calm.pairs.gap[:, inside].mean() / calm.pairs.control[:, inside].mean()
    what = f"last {100 * LATE:.0f} % of the steps"
    return _equivalence("L4", what, late_gaps(calm, start), calm, margin, calm.note(inside, raw))


def late_gaps(calm: Calm, start: float = 0.0) -> Vector:
    """By seed: mean calm gap of the last fifth of the steps, relative to the control's mean loss there."""
    if not calm.pairs.seeds:
        return np.zeros(0)
    inside = _late_window(calm.pairs, start)
    return np.asarray(calm.gap[:, inside].mean(axis=1) / calm.pairs.control[:, inside].mean(), np.float64)


def heldout(calm: Calm, margin: float = MARGIN) -> GateResult:
    """L4, its other half: the final loss on the fixed held-out windows, by the same test."""
    pairs = calm.pairs
    missing = too_little(pairs, "L4h")
    if missing:
        return missing
    gaps = heldout_gaps(pairs)
    if gaps is None:
        said = "no held-out loss after the same step in every run"
        return GateResult("L4h", "INCONCLUSIVE", said, seeds=len(pairs.seeds))
    return _equivalence("L4h", "held-out loss", gaps, calm, margin)


def heldout_gaps(pairs: Pairs) -> Vector | None:
    """By seed: gap of the final held-out loss, relative to the control's mean; None where some run has no such loss."""
    if pairs.heldout is None:
        return None
    mine, theirs = pairs.heldout
    return np.asarray((mine - theirs) / theirs.mean(), np.float64)


def _equivalence(
    gate: str, what: str, of_all: Vector, calm: Calm, margin: float, note: str = ""
) -> GateResult:
    """Two one-sided tests at `ALPHA`: PASS where the 90 % interval lies inside the margin.

    For independent, roughly normal gaps the tests pass in at most 5 % of cases at a true gap of one margin, for any number
    of seeds, and more seeds can only narrow the interval. A mean says nothing of one seed in many that went wrong: beside
    a gap of `STRAY_MARGINS` margins nothing passes. FAIL needs the 99 % interval wholly outside: where the spread is many
    margins, an interval of 90 % misses both the margin and a true gap of 0 in one case of ten.

    A seed whose control ends within a spike is left out. Where the candidate alone does, nobody can tell how it goes on,
    and nothing passes, however many other seeds there are. A candidate that is better than a control that spikes does not
    fail by that.
    """
    left_out = calm.ends_in_spike[1]
    alone = calm.ends_in_spike[0] & ~left_out
    gaps = of_all[~left_out]
    if gaps.size < MIN_SEEDS:
        said = f"{what}: only {gaps.size} of {of_all.size} controls do not end within a spike; {MIN_SEEDS} are the least"
        return GateResult(gate, "INCONCLUSIVE", said, seeds=gaps.size)
    low, high = stats.t_interval(gaps, 1 - 2 * ALPHA)
    wide_low, wide_high = stats.t_interval(gaps, FAIL_CONFIDENCE)
    if left_out.any():
        note = f"; {left_out.sum()} more left out, whose control ends within a spike{note}"
    stray = np.abs(of_all) > STRAY_MARGINS * margin
    status: Status = "INCONCLUSIVE"
    why = "the interval crosses the margin"
    if wide_low > margin or wide_high < -margin:
        status, why = "FAIL", f"wholly outside the margin, also with {100 * FAIL_CONFIDENCE:g} %"
        if wide_high < -margin and calm.bursts[1].any():
            status, why = "INCONCLUSIVE", "better by more than the margin, but the control spikes"
    elif low > margin or high < -margin:
        why = f"outside the margin, but not with {100 * FAIL_CONFIDENCE:g} %"
    elif -margin < low and high < margin:
        status, why = "PASS", "inside the margin"
        if alone.any():
            named = ", ".join(str(s) for s, is_alone in zip(calm.pairs.seeds, alone, strict=True) if is_alone)
            status, why = (
                "INCONCLUSIVE",
                f"inside the margin, but the run of seed {named} ends within a spike",
            )
        elif stray.any():
            worst = int(np.abs(of_all).argmax())
            status = "INCONCLUSIVE"
            why = f"inside the margin, but seed {calm.pairs.seeds[worst]} is off by {percent(of_all[worst])}"
    sentence = (
        f"{what}: mean gap {percent(gaps.mean())} (90 % interval {percent(low)} to {percent(high)}), margin "
        f"{percent(margin)[1:]}, sd {percent(gaps.std(ddof=1))[1:]}, {gaps.size} seeds: {why}{note}"
    )
    return estimate(gate, status, sentence, gaps, (low, high), margin)


def _late_window(pairs: Pairs, start: float = 0.0) -> Mask:
    """Logged steps of the last fifth of the run, from `start` on."""
    if not pairs.steps.size:
        return np.zeros(0, bool)
    late = pairs.steps[-1] - LATE * (pairs.steps[-1] - pairs.steps[0])
    return np.asarray(pairs.steps >= max(late, start), bool)


def _early_window(pairs: Pairs, span: Span) -> Mask:
    """Logged steps of the early window: a third of the run, at most 1,000 steps, from the start of the span on."""
    start = max(span[0], pairs.steps[0])
    stop = min(start + min(EARLY_STEPS, EARLY_SHARE * pairs.length), span[1])
    return np.asarray((pairs.steps >= start) & (pairs.steps < stop), bool)


def _early_figures(calm: Calm, inside: Mask) -> tuple[Vector, Vector]:
    """By seed: mean gap over the early window, and the largest smoothed gap in it, both relative to the loss."""
    pairs = calm.pairs
    life = half_life(pairs.length)
    smooth_gap = np.abs(ema(calm.gap, pairs.steps, life, from_zero=True)[:, inside])
    smooth_loss = ema(pairs.control, pairs.steps, life)[:, inside]
    means = calm.gap[:, inside].mean(axis=1) / pairs.control[:, inside].mean(axis=1)
    return means, (smooth_gap / smooth_loss).max(axis=1)


def _within(band: Span, limit: float) -> Span:
    """A band, cut at a limit on either side; the limits themselves where it lies beyond one of them."""
    if band[0] > limit or band[1] < -limit:
        return -limit, limit
    return max(band[0], -limit), min(band[1], limit)


def _beyond(values: Vector, limits: Span) -> Mask:
    return np.asarray((values < limits[0]) | (values > limits[1]), bool)


def _prediction(values: Vector, times: float) -> tuple[float, float]:
    """99 % prediction interval of one more value, its half-width multiplied."""
    low, high = stats.prediction_interval(values, 0.99)
    centre, half = (low + high) / 2, (high - low) / 2
    return centre - times * half, centre + times * half
