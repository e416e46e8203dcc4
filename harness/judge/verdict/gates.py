"""Gates: one function a rule, each of which looks at the same evidence and says PASS, WARN, FAIL or INCONCLUSIVE.

`RULES` names those on a candidate and its control; a new rule is a function, an entry there and a heading in
`result.GATES`. `prefix` and `band` judge a precision pattern and runs of other seeds. A rule whose question the runs cannot
answer raises `CannotTell`.

The late loss alone passes five of eight gross faults, because the optimiser absorbs them; so no gate stands for
another. Gaps are candidate minus control of the same seed, relative to the control's mean loss. L3 and L4 have two
sides: truncation instead of rounding makes the early loss better.

Limits were calibrated on planted faults in a toy (2 layers, width 48, 300 steps, six seeds): correct FP8 shows a
largest smoothed gap of 0.035 to 0.06 % and gradient-norm ratios of 0.997 to 1.000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict.curves import ema, half_life, relative_gap
from harness.judge.verdict.result import (
    ALPHA,
    LATE,
    MARGIN,
    MIN_POINTS,
    MIN_SEEDS,
    CannotTell,
    GateResult,
    Status,
    percent,
)
from harness.judge.verdict.spike_events import calm
from harness.store import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from harness.judge.verdict.curves import Pairs, Runs
    from harness.judge.verdict.spike_events import Calm, Mask
    from harness.store.stats import Estimate, Vector

MIN_GOLDEN = 5  # golden runs below which their band cannot warn: 11.5 sd wide with 3, 5.0 with 5
EARLY_STEPS = 1000
EARLY_SHARE = 1 / 3
EARLY_MEAN, EARLY_MAX = 0.0025, 0.01  # of the loss, where no golden arm sets the band
FAIL_TIMES = 4.0  # FAIL beyond so many bands
FAIL_CONFIDENCE = 0.99  # of the two-sided interval that must lie wholly outside for a FAIL of a gap gate
SPIKES_FAIL, SPIKES_UNCLEAR = 0.01, 0.125  # p of the excess of bursts: FAIL, and can't tell, up to these
MOST_SEEDS = 3 / 4  # share of the seeds that must be beyond the widest band of L3, on one side, for a FAIL
MOST_OF_GOLDEN = 2.0  # the golden arm's band of FAIL reaches up to so many times the fixed one's
MIN_WINDOW = 10  # logged steps in FP8 of a window; fewer say nothing
STRAY_MARGINS = 8.0  # a seed whose late or held-out gap is so many margins; nothing passes beside it
STRAY = 1 / 8  # share of the seeds that may be beyond the widest band of L3 in a PASS
MOST_MASKED = 1 / 4  # share of a window that is interpolated across spikes; beyond it nobody can tell
MOST_REPEATED = (
    1 / 4
)  # share of a run's gradient norms that equal the one before; beyond it they were clipped, or are stuck
SEARCHED = 1000.0  # L5 looks for the step at which the margin is met up to so many times the run
GRAD_BAND = (0.98, 1.02)  # of the ratio to the control
GRAD_WARN, GRAD_FAIL = 0.01, 0.05  # of the ratio to the golden arm, in either direction
HORIZON = 10.0  # L5 projects the gap to so many times the run
Span = tuple[float, float]  # first step, and the first one after it
WHOLE: Span = (-math.inf, math.inf)
# A control that breaks after more than so many times the candidate's steps excuses nothing
EXCUSED_TIMES = 2.0
_LARGEST = 1000.0  # of a norm's ratio, in either direction: beyond it the size says no more, and zero has no logarithm
_USUAL = (1 - FAIL_TIMES * (1 - GRAD_BAND[0]), 1 + FAIL_TIMES * (GRAD_BAND[1] - 1))  # four bands
_WORST: tuple[Status, ...] = ("FAIL", "INCONCLUSIVE", "WARN", "PASS")


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What the rules look at.

    Attributes:
        candidate, control: runs by seed.
        calm: their pairs, and the gap without spikes.
        golden: the golden emulation of the same recipe, paired with the control; None where there is none.
        margin: of equivalence, relative to the control's mean loss.
        span: the steps in which the precisions differ: a warm-up starts it, at whatever step, and a cool-down ends it.
    """

    candidate: Runs
    control: Runs
    calm: Calm
    golden: Pairs | None = None
    margin: float = MARGIN
    span: Span = WHOLE

    @property
    def pairs(self) -> Pairs:
        """The paired runs as they are."""
        return self.calm.pairs

    def enough(self) -> None:
        """Raises `CannotTell` for too few pairs or steps, or a loss of which nothing can be a share."""
        seeds, points, control = len(self.pairs.seeds), self.pairs.steps.size, self.pairs.control
        if seeds < MIN_SEEDS:
            raise CannotTell(
                f"{seeds} paired seeds; {MIN_SEEDS} are the least that has an interval, 5 the default"
            )
        if points < MIN_POINTS:
            raise CannotTell(f"{points} logged steps; fewer than {MIN_POINTS} can't be judged")
        if control.mean(axis=1).min() <= 0 or control[:, -max(1, points // 5) :].mean() <= 0:
            raise CannotTell("the control's loss is not above 0, so a gap relative to it says nothing")

    def window(self, inside: Mask, what: str = "", least: int = 0) -> None:
        """Raises `CannotTell` for a window that has too few steps in FP8, or consists of spikes."""
        if inside.sum() < least:
            raise CannotTell(f"{inside.sum()} logged steps of the {what} ran in FP8; {least} are the least")
        share = float(self.calm.masked[:, inside].mean())
        if share > MOST_MASKED:
            raise CannotTell(
                f"{100 * share:.0f} % of its steps lie in spikes of either arm; more than {100 * MOST_MASKED:g} % can't be judged"
            )


def results(evidence: Evidence) -> Iterator[GateResult]:
    """What each of `RULES` says."""
    for name, rule in RULES.items():
        yield judged(name, len(evidence.pairs.seeds), rule, evidence)


def judged(name: str, seeds: int, rule: Callable[..., GateResult], *about: Any) -> GateResult:
    """The result of a rule; INCONCLUSIVE where it cannot tell."""
    try:
        return rule(*about)
    except CannotTell as reason:
        return GateResult(name, "INCONCLUSIVE", str(reason), seeds=seeds)


def finite(candidate: Runs, control: Runs) -> GateResult:
    """L1: no NaN or infinity in a loss or gradient. Where the control breaks in the same
    seed, and not much later, the gate is INCONCLUSIVE."""
    broken, base = (
        {seed: run.broke_at for seed, run in sorted(runs.items()) if run.broke_at is not None}
        for runs in (candidate, control)
    )
    status: Status = "PASS"
    sentence = f"finite in all {len(candidate)} runs"
    if broken:
        where = [
            f"seed {s} at step {at}" + (f" (control at {base[s]})" if s in base else "")
            for s, at in broken.items()
        ]
        status, sentence = "FAIL", f"NaN or infinity in {', '.join(where)}"
        # A control that breaks much later is no excuse: the candidate broke by itself.
        if all(base.get(seed, math.inf) <= EXCUSED_TIMES * at for seed, at in broken.items()):
            status, sentence = "INCONCLUSIVE", f"{sentence}; the control broke in the same seeds"
    return GateResult("L1", status, sentence, seeds=len(candidate))


def spikes(evidence: Evidence) -> GateResult:
    """L2: no evidence of more bursts of spikes than the control has.

    Under one law for both arms, each run's count could as well be the other arm's. The one-sided p is the share of the
    ways to deal all counts to two arms that give the candidate at least its sum. It needs no law for the counts, so
    runs of which a few have most spikes do not break it; and pairs that resemble each other only make it smaller.
    """
    mine, theirs = evidence.calm.bursts
    if not mine.size:
        raise CannotTell("no pair of runs to count spikes in")
    p = stats.larger_sum_p(mine, theirs)
    count, excess = mine.sum(), int(mine.sum() - theirs.sum())
    status: Status = "PASS"
    by_seed = ", ".join(f"{a}/{b}" for a, b in zip(mine, theirs, strict=True))
    sentence = (
        f"{count} spike{'' if count == 1 else 's'} against {theirs.sum()} of the control (by seed {by_seed})"
    )
    if excess > 0:
        status = "FAIL" if p <= SPIKES_FAIL else "INCONCLUSIVE" if p <= SPIKES_UNCLEAR else "WARN"
        sentence += (
            f"; one-sided p of as large a sum under one law {p:.3f} (FAIL up to {SPIKES_FAIL:g}, can't tell up to "
            f"{SPIKES_UNCLEAR:g}); aftershocks count with their spike"
        )
    return GateResult("L2", status, sentence, effect=float(excess), seeds=mine.size, unit="spikes")


def early_window(evidence: Evidence) -> GateResult:
    """L3: mean gap and largest smoothed gap early on, in the band that the golden emulation spans.

    WARN looks at the worst seed. FAIL needs three quarters of the seeds beyond the widest band on one side: the worst of
    many correct seeds is far out, so that a limit for it would fail the more correct arms the more seeds they have.
    Where more than `STRAY` of the seeds lie beyond that band, the gate can't tell. With fewer than `MIN_GOLDEN` golden
    seeds their band is so wide that beyond it nobody can tell: at 3 seeds it is 11.5 sd, and FAIL needs 46.
    """
    evidence.enough()
    pairs, (first, end) = evidence.pairs, evidence.span
    in_fp8 = int(((pairs.steps >= first) & (pairs.steps < end)).sum())
    if in_fp8 < MIN_POINTS:
        raise CannotTell(f"{in_fp8} logged steps ran in FP8; fewer than {MIN_POINTS} can't be judged")
    first = max(first, pairs.steps[0])
    end = min(first + min(EARLY_STEPS, EARLY_SHARE * pairs.length), end)
    inside = (pairs.steps >= first) & (pairs.steps < end)
    evidence.window(inside)
    means, peaks = _early_figures(evidence.calm, inside)
    golden, source, seeds = None, "fixed band, no golden arm", 0
    # The golden arm has no warm-up; right after one its gap is no measure.
    if evidence.golden is not None and evidence.span[0] == WHOLE[0]:
        seeds = len(evidence.golden.seeds)
        if seeds >= MIN_SEEDS:
            golden, source = _early_figures(calm(evidence.golden), inside), f"band of {seeds} golden runs"

    def band(times: float, most: float) -> tuple[Span, float]:
        """Limits of the means, and the upper one of the peaks: less than the golden arm's is no fault."""
        if golden is None:
            return (-EARLY_MEAN * times, EARLY_MEAN * times), EARLY_MAX * times
        # A golden arm that is itself far from the control, or whose seeds scatter, is no measure: its band has a limit.
        limit = most * EARLY_MEAN * FAIL_TIMES
        low, high = _prediction(golden[0], times)
        mean = (-limit, limit) if low > limit or high < -limit else (max(low, -limit), min(high, limit))
        return mean, min(_prediction(golden[1], times)[1], most * EARLY_MAX * FAIL_TIMES)

    def beyond(mean: Span, peak: float) -> Mask:
        return np.asarray((means < mean[0]) | (means > mean[1]) | (peaks > peak), bool)

    mean_band, peak_band = band(1.0, 1.0)
    stray = beyond(*band(FAIL_TIMES, MOST_OF_GOLDEN))
    status: Status = "PASS"
    if stray.any():
        source += f", {stray.sum()} of {stray.size} seeds are beyond {FAIL_TIMES:g} bands"
    if max((stray & (means > 0)).mean(), (stray & (means < 0)).mean()) >= MOST_SEEDS:
        status = "FAIL"
        if means.mean() < 0 and evidence.calm.bursts[1].any():
            status = "INCONCLUSIVE"
            source += ", on the better side, and the control spikes"
    elif stray.mean() > STRAY:
        status = "INCONCLUSIVE"
    elif beyond(mean_band, peak_band).any():
        status = "WARN"
        if MIN_SEEDS <= seeds < MIN_GOLDEN:
            status = "INCONCLUSIVE"
            source += f", too few of {MIN_GOLDEN} to tell a fault from the recipe's own effect"
    raw = float((pairs.gap[:, inside].mean(axis=1) / pairs.control[:, inside].mean(axis=1)).mean())
    first, last = pairs.steps[inside][[0, -1]]
    sentence = (
        f"steps {int(first)} to {int(last)}: mean gap {percent(means.mean())}, worst seed "
        f"{percent(means[np.abs(means).argmax()])} against {percent(mean_band[0])} to {percent(mean_band[1])}; largest "
        f"smoothed gap {percent(peaks.max())} against {percent(peak_band)} ({source}; FAIL where "
        f"{100 * MOST_SEEDS:g} % of the seeds are beyond {FAIL_TIMES:g} bands){evidence.calm.note(inside, raw)}"
    )
    margin = max(map(abs, mean_band))
    return _of_the_loss("L3", status, sentence, means, stats.t_interval(means), margin)


def _early_figures(of: Calm, inside: Mask) -> tuple[Vector, Vector]:
    """By seed: mean gap over the early window, and the largest smoothed gap in it, both relative to the loss."""
    means = of.gap[:, inside].mean(axis=1) / of.pairs.control[:, inside].mean(axis=1)
    return means, np.abs(relative_gap(of.pairs, of.gap))[:, inside].max(axis=1)


def _prediction(values: Vector, times: float) -> Span:
    """99 % prediction interval of one more value, its half-width multiplied."""
    low, high = stats.prediction_interval(values, 0.99)
    centre, half = (low + high) / 2, (high - low) / 2
    return centre - times * half, centre + times * half


def late_window(evidence: Evidence) -> GateResult:
    """L4: mean loss of the last fifth of the steps, equivalent within the margin (two one-sided tests); steps that did not
    run in FP8 are left out of the window."""
    evidence.enough()
    pairs, what = evidence.pairs, f"last {100 * LATE:.0f} %"
    inside = _late(pairs.steps, evidence.span[0])
    evidence.window(inside, what, MIN_WINDOW)
    raw = pairs.gap[:, inside].mean() / pairs.control[:, inside].mean()
    gaps = late_gaps(evidence.calm, evidence.span[0])
    return _equivalence("L4", f"{what} of the steps", gaps, evidence, evidence.calm.note(inside, raw))


def late_gaps(of: Calm, start: float = WHOLE[0]) -> Vector:
    """By seed: mean calm gap of the last fifth of the steps from `start` on, relative to the control's mean loss there."""
    if not of.pairs.seeds:
        return np.zeros(0)
    inside = _late(of.pairs.steps, start)
    return np.asarray(of.gap[:, inside].mean(axis=1) / of.pairs.control[:, inside].mean(), np.float64)


def _late(steps: Vector, start: float = WHOLE[0]) -> Mask:
    return np.asarray(steps >= max(steps[-1] - LATE * (steps[-1] - steps[0]), start), bool)


def heldout(evidence: Evidence) -> GateResult:
    """L4, its other half: the final loss on the fixed held-out windows, by the same test."""
    evidence.enough()
    gaps = heldout_gaps(evidence.pairs)
    if gaps is None:
        raise CannotTell("no held-out loss after the same step in every run")
    return _equivalence("L4h", "held-out loss", gaps, evidence)


def heldout_gaps(pairs: Pairs) -> Vector | None:
    """By seed: gap of the final held-out loss, relative to the control's mean; None where some run has no such loss."""
    if pairs.heldout is None:
        return None
    mine, theirs = pairs.heldout
    return np.asarray((mine - theirs) / theirs.mean(), np.float64)


def _equivalence(gate: str, what: str, of_all: Vector, evidence: Evidence, note: str = "") -> GateResult:
    """Two one-sided tests at `ALPHA`: PASS where the 90 % interval lies inside the margin.

    For independent, roughly normal gaps the tests pass in at most 5 % of cases at a true gap of one margin, for any number
    of seeds, and more seeds can only narrow the interval. A mean says nothing of one seed in many that went wrong: beside
    a gap of `STRAY_MARGINS` margins nothing passes. FAIL needs the 99 % interval wholly outside: where the spread is many
    margins, an interval of 90 % misses both the margin and a true gap of 0 in one case of ten.

    A seed whose control ends within a spike is left out. Where the candidate alone does, nobody can tell how it goes on,
    and nothing passes, however many other seeds there are. A candidate that is better than a control that spikes does not
    fail by that.
    """
    seeds, margin = evidence.pairs.seeds, evidence.margin
    open_in_candidate, left_out = evidence.calm.ends_in_spike
    gaps = of_all[~left_out]
    if gaps.size < MIN_SEEDS:
        raise CannotTell(
            f"{what}: only {gaps.size} of {of_all.size} controls do not end within a spike; {MIN_SEEDS} are the least"
        )
    if left_out.any():
        note = f"; {left_out.sum()} more left out, whose control ends within a spike{note}"
    low, high = stats.t_interval(gaps, 1 - 2 * ALPHA)
    wide_low, wide_high = stats.t_interval(gaps, FAIL_CONFIDENCE)
    alone = [str(seeds[i]) for i in np.flatnonzero(open_in_candidate & ~left_out)]
    worst = int(np.abs(of_all).argmax())
    status: Status = "INCONCLUSIVE"
    if wide_high < -margin and evidence.calm.bursts[1].any():
        why = "better by more than the margin, but the control spikes"
    elif wide_low > margin or wide_high < -margin:
        status, why = "FAIL", f"wholly outside the margin, also with {100 * FAIL_CONFIDENCE:g} %"
    elif low > margin or high < -margin:
        why = f"outside the margin, but not with {100 * FAIL_CONFIDENCE:g} %"
    elif not (-margin < low and high < margin):
        why = "the interval crosses the margin"
    elif alone:
        why = f"inside the margin, but the run of seed {', '.join(alone)} ends within a spike"
    elif abs(of_all[worst]) > STRAY_MARGINS * margin:
        why = f"inside the margin, but seed {seeds[worst]} is off by {percent(of_all[worst])}"
    else:
        status, why = "PASS", "inside the margin"
    sentence = (
        f"{what}: mean gap {percent(gaps.mean())} (90 % interval {percent(low)} to {percent(high)}), margin "
        f"{percent(margin)[1:]}, sd {percent(gaps.std(ddof=1))[1:]}, {gaps.size} seeds: {why}{note}"
    )
    return _of_the_loss(gate, status, sentence, gaps, (low, high), margin)


def trend(evidence: Evidence) -> GateResult:
    """L5: can't tell where the smoothed gap grows with log(step) and would leave the margin at ten times the steps.

    A line is fitted within each seed and its intervals are taken over seeds: residuals of one smoothed curve are far
    from independent, so an interval of a single fit would be too narrow. The result always says after how many steps
    the upper bound of the extrapolated gap meets the margin. Only the upper side is judged: a candidate that is better
    and better diverges from its control, but does not train worse.
    """
    evidence.enough()
    pairs, margin, steps = evidence.pairs, evidence.margin, evidence.pairs.steps
    half = steps >= max(steps[0] + (steps[-1] - steps[0]) / 2, evidence.span[0])
    evidence.window(half, "second half", MIN_WINDOW)
    scale = pairs.control[:, half].mean()
    gap = ema(evidence.calm.gap, steps, half_life(pairs.length), from_zero=True)[:, half] / scale
    x = np.log(steps[half] - steps[0] + 1)
    centred = x - x.mean()
    means, slopes = gap.mean(axis=1), gap @ centred / (centred @ centred)
    low, high = stats.t_interval(slopes)
    projected = float((means + slopes * (centred[-1] + math.log(HORIZON))).mean())
    is_growing = low > 0 and projected > margin
    # A control that comes back from a spike lets the gap rise from below 0: undecided, but no divergence.
    is_above = stats.t_interval(gap[:, -max(1, gap.shape[1] // 5) :].mean(axis=1))[0] > 0
    met = _margin_at(means, slopes, float(centred[-1]), margin) * pairs.length
    when = "has met the margin" if met <= pairs.length else f"meets the margin after {met:,.0f} steps"
    if math.isinf(met):
        when = f"does not meet the margin within {SEARCHED:,.0f} times the steps of the run"
    sentence = (
        f"slope {percent(slopes.mean())} of the loss per e-fold of steps (95 % interval {percent(low)} to "
        f"{percent(high)}); projected to {HORIZON:g} times the steps {percent(projected)} against {percent(margin)}; the "
        f"upper 95 % bound of the trend {when}"
        + (": diverging" if is_growing and is_above else ": rising from below 0" if is_growing else "")
        + evidence.calm.note(half, float(pairs.gap[:, half].mean() / scale))
    )
    found = _of_the_loss(
        "L5", "INCONCLUSIVE" if is_growing else "PASS", sentence, slopes, (low, high), margin
    )
    return replace(found, margin_at_step=met)


def _margin_at(means: Vector, slopes: Vector, end: float, margin: float) -> float:
    """After how many times the run the upper bound meets the margin: 1 where it has at the end, infinity beyond `SEARCHED`.

    Args:
        means: of the smoothed gap, by seed; the line's value at the mean of log(step).
        slopes: of that line, by seed.
        end: log(step) at the end of the run, from that mean.
        margin: relative to the loss.
    """
    from scipy.optimize import brentq

    times, most = stats.t_quantile(1 - ALPHA, means.size - 1) / math.sqrt(means.size), math.log(SEARCHED)

    def above(ahead: float) -> float:
        at = means + slopes * (end + ahead)
        return float(at.mean() + times * at.std(ddof=1) - margin)

    if above(0.0) >= 0:
        return 1.0
    # The bound is convex in log(step): from below the margin it crosses it once.
    return math.inf if above(most) < 0 else math.exp(brentq(above, 0.0, most, xtol=1e-6))


def gradients(evidence: Evidence) -> GateResult:
    """L6: the scale of the gradients, which a loss under AdamW hides: the ratio of the candidate's gradient norms to the
    golden arm's, and to the control's.

    AdamW divides each gradient by its own running size, so gradients that are 2 % too large train as well as right ones.
    The norm is compared with that of the golden arm (the same recipe emulated, the same weights and batches), since a
    recipe itself can change it: on a small transformer tensorwise with e5m2 gradients raises it by 1 to 3 %. It is that of
    the converted layers' weights where both arms stored it: in the norm of the whole model a head that is not converted
    hides most of an error (docs/loss-verdict-evidence.md).

    Two ratios to the golden arm are judged, and the worse one decides: the median over steps, and that of step 0, where
    the weights of both arms are still equal and the ratio is exact but for the order of additions. Either is PASS, WARN
    beyond 1 %, FAIL beyond 5 %, where its 95 % interval over seeds lies wholly beyond, and INCONCLUSIVE where the interval
    reaches beyond 5 %. The ratio to the control is reported beside them, outside `GRAD_BAND` with that of the golden arm.
    Beyond four bands the gate can't tell: the recipe changes the norm so much, or candidate and golden arm share a fault.

    Without three golden runs nobody can tell the recipe from a fault: the ratio to the control is INCONCLUSIVE from
    `GRAD_BAND` up to four bands and where its interval reaches beyond those, and the sentence says what it does not see.
    """
    evidence.enough()
    span, golden = evidence.span, evidence.golden
    ratios = _against_control(evidence.pairs, span)
    if ratios is None:
        raise CannotTell("no gradient norms above 0 at the same steps in every run")
    control = stats.geometric_mean(ratios)
    is_usual = GRAD_BAND[0] <= control.value <= GRAD_BAND[1]
    is_far = control.value < _USUAL[0] or control.value > _USUAL[1]
    found = None if golden is None else _against_golden(evidence.pairs, golden, span)
    if golden is None or found is None:
        status: Status = "INCONCLUSIVE"
        if is_usual and not _reaches(control, _USUAL[1] - 1):
            status = "PASS"
        elif control.high < _USUAL[0] or control.low > _USUAL[1]:
            status = "FAIL"
        sentence = (
            f"gradients {_shown(control)} times the control's, against {GRAD_BAND[0]} to {GRAD_BAND[1]}; without three golden "
            "runs the recipe's own effect is not known, and an error of the gradients' scale of "
            f"{100 * (GRAD_BAND[1] - 1):g} % or less, or within the interval, is not seen"
        )
        return _ratio(status, sentence, ratios, (GRAD_BAND if status == "PASS" else _USUAL)[1] - 1)
    what, steps, logs = found
    sizes = [np.exp(np.median(logs, axis=1))]
    median = stats.geometric_mean(sizes[0])
    sentence = f"gradients {median.value:.3f} times the golden arm's ({median.low:.3f} to {median.high:.3f}; {what}; median over steps)"
    if steps[0] == 0:
        sizes.append(np.exp(logs[:, 0]))
        sentence += f", at step 0 {_shown(stats.geometric_mean(sizes[1]))}"
    sentence += f"; WARN beyond {100 * GRAD_WARN:g} %, FAIL beyond {100 * GRAD_FAIL:g} %; {_shown(control)} times the control's"
    if not is_usual and (own := _against_control(golden, span)) is not None:
        sentence += f", the golden arm {_shown(stats.geometric_mean(own))}: "
        sentence += "the recipe, or a fault of both" if is_far else "the recipe's own effect"
    statuses: list[tuple[Status, Vector]] = [(_scale(size), size) for size in sizes]
    statuses.append(("INCONCLUSIVE" if is_far else "PASS", ratios))
    status, worst = min(statuses, key=lambda one: _WORST.index(one[0]))
    limit = _USUAL[1] - 1 if worst is ratios else GRAD_WARN if status in ("PASS", "WARN") else GRAD_FAIL
    return _ratio(status, sentence, worst, limit)


def _scale(ratios: Vector) -> Status:
    """What ratios to the golden arm, which should be 1, say of an implementation."""
    size = stats.geometric_mean(ratios)
    fail, warn = (size.low > 1 + limit or size.high < 1 / (1 + limit) for limit in (GRAD_FAIL, GRAD_WARN))
    return "FAIL" if fail else "INCONCLUSIVE" if _reaches(size, GRAD_FAIL) else "WARN" if warn else "PASS"


def _reaches(size: Estimate, limit: float) -> bool:
    """A part of the interval lies beyond 1 + limit or its inverse."""
    return size.high > 1 + limit or size.low < 1 / (1 + limit)


def _shown(size: Estimate) -> str:
    return f"{size.value:.3f} ({size.low:.3f} to {size.high:.3f})"


def _against_control(pairs: Pairs, span: Span) -> Vector | None:
    """Candidate over control by seed, median over the steps of the span; None where a norm is missing or not above 0."""
    if pairs.grad_norm is None:
        return None
    steps, mine, theirs = pairs.grad_norm
    logs = _log_ratios(steps, mine, theirs, span)
    return None if logs is None else np.exp(np.median(logs, axis=1))


def _against_golden(pairs: Pairs, golden: Pairs, span: Span) -> tuple[str, Vector, Vector] | None:
    """(whose norm, steps, log(candidate / golden)) of the seeds of both; None for under three or without norms.

    Raises:
        CannotTell: norms that both stored cannot be compared; the other norm would hide what is wrong with them.
    """
    seeds = [s for s in pairs.seeds if s in golden.seeds]
    if len(seeds) < MIN_SEEDS:
        return None
    mine, theirs = ([of.seeds.index(s) for s in seeds] for of in (pairs, golden))
    for what, own, other in (
        ("weights of the FP8 layers", pairs.fp8_grad_norm, golden.fp8_grad_norm),
        ("whole model, which dilutes an error in the FP8 layers", pairs.grad_norm, golden.grad_norm),
    ):
        if own is None or other is None or not np.array_equal(own[0], other[0]):
            continue
        steps = own[0]
        logs = _log_ratios(steps, own[1][mine], other[1][theirs], span)
        if logs is None:
            raise CannotTell(f"the golden arm's gradient norm ({what}) is 0 at some step")
        return what, steps[(steps >= span[0]) & (steps < span[1])], logs
    return None


def _log_ratios(steps: Vector, mine: Vector, theirs: Vector, span: Span) -> Vector | None:
    """log(mine / theirs), [S, steps of the span]; None where there is none, or one of theirs is not above 0.

    Raises:
        CannotTell: norms repeat themselves. Zeros are no such: gradients that vanish are a fault.
    """
    inside = (steps >= span[0]) & (steps < span[1])
    mine, theirs = mine[:, inside], theirs[:, inside]
    if not mine.size or (theirs <= 0).any():
        return None
    for norms in (mine, theirs):
        repeated = np.diff(np.where(norms > 0, norms, np.nan), prepend=np.nan) == 0
        if repeated.mean(axis=1).max() > MOST_REPEATED:
            raise CannotTell(
                "gradient norms repeat from step to step: they show nothing; log them before they are clipped"
            )
    return np.asarray(np.log(np.clip(mine / theirs, 1 / _LARGEST, _LARGEST)), np.float64)


def _ratio(status: Status, sentence: str, ratios: Vector, margin: float) -> GateResult:
    size = stats.geometric_mean(ratios)
    sd = float(ratios.std(ddof=1))
    return GateResult(
        "L6", status, sentence, size.value, size.low, size.high, sd, ratios.size, margin, "ratio"
    )


def _of_the_loss(
    gate: str, status: Status, sentence: str, values: Vector, interval: Span, margin: float
) -> GateResult:
    """A result whose effect is the mean over seeds of something relative to the loss."""
    effect, sd = float(values.mean()), float(values.std(ddof=1))
    return GateResult(gate, status, sentence, effect, *interval, sd, values.size, margin, "of the loss")


RULES: Mapping[str, Callable[[Evidence], GateResult]] = {
    "L1": lambda evidence: finite(evidence.candidate, evidence.control),
    "L2": spikes,
    "L3": early_window,
    "L4": late_window,
    "L4h": heldout,
    "L5": trend,
    "L6": gradients,
}


def prefix(candidate: Runs, twin: Runs, named: str) -> GateResult:
    """A precision pattern is bit for bit its base arm until it switches.

    Args:
        candidate: runs that have a `switch_step`.
        twin: runs of the arm that trains all the way as the candidate does until its switch.
        named: what to call that arm.
    """
    shared = sorted(candidate.keys() & twin.keys())
    if not shared:
        raise CannotTell(f"no run of {named} to compare the first phase with")
    if alone := sorted(candidate.keys() - twin.keys()):
        raise CannotTell(f"no run of {named} for seed {', '.join(map(str, alone))}")
    worst, differing, compared = 0.0, [], 0
    for seed in shared:
        run, other = candidate[seed], twin[seed]
        if run.switch_step is None:
            raise CannotTell(f"seed {seed} does not record at which step it switched")
        for mine, theirs in ((run.loss, other.loss), (run.grad_norm, other.grad_norm)):
            if mine is None or theirs is None:
                continue
            a, b = mine.steps < run.switch_step, theirs.steps < run.switch_step
            steps = mine.steps[a]
            if not np.array_equal(steps, theirs.steps[b]):
                raise CannotTell(f"seed {seed} was logged at other steps than {named}")
            compared += steps.size
            gap = np.abs(mine.values[a] - theirs.values[b])
            if gap.any():
                differing.append(f"seed {seed} at step {int(steps[gap != 0][0])}")
                worst = max(worst, float(gap.max()))
    if not compared:
        raise CannotTell("the first phase has no logged step")
    sentence = f"bitwise equal to {named} in {compared} values before the switch"
    if differing:
        sentence = f"differs from {named} before the switch: {', '.join(differing)}; by up to {worst:.3g}"
    return GateResult(
        "prefix", "FAIL" if differing else "PASS", sentence, worst, seeds=len(shared), margin=0.0
    )


def band(other: Runs, control: Runs) -> GateResult:
    """Runs of other seeds, unpaired: each late loss inside the interval that the control's seeds predict for one more.

    Its level is 99 % for all runs together. This is the wide band: it is some twenty times the paired noise.
    """
    steps = max((r.loss.steps for r in control.values()), key=len, default=np.zeros(0))
    mine, base = (
        [r for r in runs.values() if np.array_equal(r.loss.steps, steps) and r.broke_at is None]
        for runs in (other, control)
    )
    if len(base) < MIN_SEEDS or not mine or steps.size < MIN_POINTS:
        raise CannotTell(f"{len(base)} control runs and {len(mine)} others of {steps.size} steps are too few")
    late = _late(steps)
    losses = {"late": [np.array([r.loss.values[late].mean() for r in runs]) for runs in (mine, base)]}
    if all(r.heldout for r in (*mine, *base)):
        losses["held-out"] = [
            np.array([r.heldout.values[-1] for r in runs if r.heldout]) for runs in (mine, base)
        ]
    outside, parts, ends = False, [], {}
    for what, (own, theirs) in losses.items():
        ends[what] = low, high = stats.prediction_interval(theirs, 1 - 0.01 / own.size)
        outside |= bool((own < low).any() or (own > high).any())
        parts.append(f"{what} loss {own.min():.4f} to {own.max():.4f} against {low:.4f} to {high:.4f}")
    own, theirs = losses["late"]
    return GateResult(
        "band",
        "FAIL" if outside else "PASS",
        "; ".join(parts),
        effect=float(own.mean() / theirs.mean() - 1),
        seeds=len(mine),
        margin=float((ends["late"][1] - ends["late"][0]) / 2 / theirs.mean()),
        unit="of the loss",
    )
