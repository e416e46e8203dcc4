"""Paired: runs of one seed that share weights and batches, judged by the one rule, and what only such runs allow.

A training loss is judged as anyone's curves are, with the differences of a seed as the statistic (`rule.judge`); its parts
are shown as gates. Runs that share everything but the arithmetic must be equal in both directions: a candidate that is
better by more than the margin fails too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.verdict.course import Course, difference, ends
from harness.judge.verdict.curves import pair
from harness.judge.verdict.evidence import Evidence, LossRun
from harness.judge.verdict.gradients import enough_pairs, gradients
from harness.judge.verdict.result import (
    LATE,
    MARGIN,
    MIN_POINTS,
    MIN_SEEDS,
    CannotTell,
    GateResult,
    GateStatus,
    percent,
)
from harness.judge.verdict.rule import FAIL_CONFIDENCE, PASS_CONFIDENCE, CurveVerdict, LossOutcome, judge
from harness.store import stats
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from harness.judge.verdict.curves import Pairs, Run, Runs
    from harness.judge.verdict.gradients import Span
    from harness.store.stats import Vector, Welch

WHOLE: Span = (-math.inf, math.inf)
# A control that breaks after more than so many times the candidate's steps excuses nothing
EXCUSED_TIMES = 2.0
# gate -> the findings of the one rule that it shows
PARTS = {
    "L2": ("spikes",),
    "L3": ("course", "swing", "smooth", "uneven", "stray", "other_start"),
    "L5": ("trend",),
}
SHOWN = {"few_runs", "few_values"}.union(*PARTS.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one candidate.

    Attributes:
        outcome: PASS, FAIL or INCONCLUSIVE.
        gates: one result a gate, in the order of `GATES`.
        notes: what a reader must know beside the gates: missing controls, runs that had no partner.
        limits: what runs of this length cannot certify, with their steps and tokens.
        not_fp8: why FP8 cannot have run; "" where nothing speaks against it. Also among the notes.
    """

    outcome: LossOutcome
    gates: tuple[GateResult, ...]
    notes: tuple[str, ...]
    limits: str
    not_fp8: str = ""

    def gate(self, name: str) -> GateResult | None:
        """The result of one gate; None where it does not apply."""
        return next((g for g in self.gates if g.gate == name), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The gates that decided, or the warnings of a PASS, as "L4: sentence"; those that say the same, in one."""
        decisive = "WARN" if self.outcome == "PASS" else self.outcome
        names = grouped((g.sentence, g.gate) for g in self.gates if g.status == decisive)
        return tuple(f"{', '.join(gates)}: {sentence}" for sentence, gates in names.items())


def judge_pairs(
    candidate: Runs,
    control: Runs,
    *,
    golden: Runs | None = None,
    twin: Runs | None = None,
    twin_name: str = "its base arm",
    margin: float = MARGIN,
    excused: Sequence[str] = ("equals_base",),
) -> Verdict:
    """Judges a candidate against the control that shares its initial weights and batches, seed by seed.

    Args:
        candidate: runs by seed. Runs with a `switch_step` are a precision pattern and need `twin`.
        control: runs by seed, of the arm whose loss is the right one.
        golden: runs of the emulation of the candidate's recipe; the candidate's gradient norms are compared with theirs.
        twin: of a precision pattern, the runs that must be bitwise equal until the switch. Where it is the control
            itself (warm-up), the runs are judged from the switch on; where it is another arm (cool-down), their gradient
            norms are judged until there.
        twin_name: what to call that arm.
        margin: of equivalence, relative to the control's mean loss.
        excused: codes of findings that withhold nothing.

    Raises:
        ValueError: the margin is not above 0, or there is no run on one side.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin} must be above 0; 0.0025 is 0.25 % of the control's loss")
    if not candidate or not control:
        raise ValueError(f"{len(candidate)} candidate and {len(control)} control runs: both sides need some")
    switches = [run.switch_step for run in candidate.values() if run.switch_step is not None]
    back = [run.switch_back_step for run in candidate.values() if run.switch_back_step is not None]
    span = WHOLE
    if switches and twin is control:
        span = float(max(switches)), float(min(back, default=math.inf))
    elif switches and twin:
        span = WHOLE[0], float(min(switches))
    pairs, seeds = pair(candidate, control), len(candidate)
    band = pair(golden, control, "golden arm") if golden else None
    notes = [*pairs.problems]
    results = [finite(candidate, control)]
    try:
        found, course = _curves(pairs, candidate, control, span[0], margin, excused)
        results += [
            *_shown(found, course),
            judged("L4h", len(pairs.seeds), _heldout, found, pairs),
        ]
        results.sort(key=lambda result: result.gate)
        notes += [f"{each.code}: {each.text}" for each in found.findings if each.code not in SHOWN]
    except CannotTell as why:
        names = ("L2", "L3", "L4", "L4h", "L5")
        results += [GateResult(name, "INCONCLUSIVE", str(why), seeds=len(pairs.seeds)) for name in names]
    results.append(judged("L6", len(pairs.seeds), gradients, pairs, band, span))
    if switches:
        results.append(judged("prefix", seeds, prefix, candidate, twin or {}, twin_name))
    withheld = bool(notes)
    if switches and twin and twin is not control:
        notes += _cooled(candidate, twin, control)
    if band is not None:
        notes += [problem for problem in band.problems if problem not in notes]
    return conclude(results, notes, limits({**control, **candidate}.values()), whole=not withheld)


def conclude(
    results: Sequence[GateResult], notes: Iterable[str], limit: str, *, whole: bool = True
) -> Verdict:
    """The verdict that follows from the gates; `whole`: nothing else withholds PASS."""
    statuses = {r.status for r in results}
    outcome: LossOutcome = "PASS"
    if "FAIL" in statuses:
        outcome = "FAIL"
    elif "INCONCLUSIVE" in statuses or not whole:
        outcome = "INCONCLUSIVE"
    return Verdict(outcome, tuple(results), tuple(notes), limit)


def _curves(
    pairs: Pairs, candidate: Runs, control: Runs, start: float, margin: float, excused: Sequence[str]
) -> tuple[CurveVerdict, Course]:
    """The one rule on the training losses of whole pairs, from a step on; and on their held-out losses, where there are some.

    Raises:
        CannotTell: too few pairs or steps, or no loss above 0.
    """
    enough_pairs(pairs)
    inside = pairs.steps >= start
    if (count := int(inside.sum())) < MIN_POINTS:
        where = " ran in FP8" if count < inside.size else ""
        raise CannotTell(f"{count} logged steps{where}; fewer than {MIN_POINTS} can't be judged")

    def runs(side: Runs, losses: Vector) -> list[LossRun]:
        import pandas as pd

        # a loss at step 0 precedes the first update: steps are counted by the updates that follow
        steps, last = pairs.steps[inside] + 1, float(pairs.steps[-1]) + 1
        beside = [
            {}
            if (curve := side[seed].heldout) is None
            else {"heldout_loss": pd.Series(curve.values, curve.steps)}
            for seed in pairs.seeds
        ]
        names = (f"seed {seed}" for seed in pairs.seeds)
        return [
            LossRun(name, steps, row[inside], last, series=series)
            for name, row, series in zip(names, losses, beside, strict=True)
        ]

    sides = runs(control, pairs.control), runs(candidate, pairs.candidate)
    window = int((_is_late(pairs.steps) & inside).sum())
    found = judge(Evidence(*sides, True, margin, window, excused=excused))
    if found.course is None:
        raise CannotTell("the control's loss is not above 0, so a gap relative to it says nothing")
    return found, found.course


def _shown(found: CurveVerdict, course: Course) -> Iterator[GateResult]:
    """The one rule's parts as gates: spikes, course, end and trend."""
    findings = {
        gate: "".join(f"; {each.code}: {each.text}" for each in found.findings if each.code in codes)
        for gate, codes in PARTS.items()
    }
    status: dict[str, GateStatus] = {
        gate: "INCONCLUSIVE" if text else "PASS" for gate, text in findings.items()
    }
    theirs, mine = (side.sum(axis=1) for side in course.spikes)
    excess = int(mine.sum() - theirs.sum())
    by_seed = ", ".join(f"{a}/{b}" for a, b in zip(mine, theirs, strict=True))
    sentence = f"losses {100 * course.spike_limit:.2g} % above the usual: {mine.sum()} against {theirs.sum()} of the control (by seed {by_seed})"
    spikes: GateStatus = "WARN" if status["L2"] == "PASS" and excess > 0 else status["L2"]
    yield GateResult("L2", spikes, sentence + findings["L2"], float(excess), seeds=mine.size, unit="spikes")
    third = max(1, course.steps // 3)
    base, candidate = (side[:, :third].mean(axis=1) for side in course.shares)
    gap = difference(base, candidate, paired=True)
    sentence = f"mean gap of the first third {percent(gap.difference)}"
    sentence += findings["L3"] or f"; no piece of the course is shown beyond {percent(found.margin)[1:]}"
    yield _gap("L3", status["L3"], sentence, gap, found, gap.interval())
    yield _equivalence("L4", f"last {100 * LATE:.0f} % of the steps", course.end.ways[0], found)
    gap = course.slope()
    low, high = gap.interval()
    sentence = f"slope {percent(gap.difference)} of the loss per e-fold of steps (95 % interval {percent(low)} to {percent(high)})"
    yield _gap("L5", status["L5"], sentence + findings["L5"], gap, found, (low, high))


def _heldout(found: CurveVerdict, pairs: Pairs) -> GateResult:
    """L4, its other half: the final loss on the fixed held-out windows, by the same test."""
    gaps = heldout_gaps(pairs)
    if gaps is None:
        raise CannotTell("no held-out loss after the same step in every run")
    return _equivalence("L4h", "held-out loss", difference(np.zeros(gaps.size), gaps, paired=True), found)


def _equivalence(gate: str, what: str, gap: Welch, found: CurveVerdict) -> GateResult:
    """PASS where the interval lies inside the margin; FAIL where the 99 % interval lies outside, on either side, and the curves
    are evidence."""
    margin, seeds = found.margin, len(found.evidence.base)
    (low, high), (least, most) = gap.interval(PASS_CONFIDENCE), gap.interval(FAIL_CONFIDENCE)
    status: GateStatus = "PASS" if -margin < low and high < margin else "INCONCLUSIVE"
    word = "equivalent" if status == "PASS" else "not shown"
    if least > margin or most < -margin:
        word = "worse" if gap.difference > 0 else "better: not the same arithmetic"
        status = "FAIL" if all(each.is_soft for each in found.findings) else "INCONCLUSIVE"
    sentence = (
        f"{what}: gap {percent(gap.difference)}, {100 * PASS_CONFIDENCE:.0f} % interval {percent(low)} to {percent(high)}, margin "
        f"{percent(margin)[1:]}, {seeds} seeds: {word}"
    )
    return _gap(gate, status, sentence, gap, found, (low, high))


def _gap(
    gate: str,
    status: GateStatus,
    sentence: str,
    gap: Welch,
    found: CurveVerdict,
    interval: tuple[float, float],
) -> GateResult:
    seeds = len(found.evidence.base)
    sd = gap.error * math.sqrt(seeds)
    return GateResult(
        gate, status, sentence, gap.difference, *interval, sd, seeds, found.margin, "of the loss"
    )


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
    status: GateStatus = "PASS"
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


def limits(runs: Iterable[Run]) -> str:
    """What runs of this length cannot certify, in numbers.

    DeepSeek-V3 (arXiv 2412.19437, appendix B.2) reports that blockwise quantised activation gradients diverged after
    about 300 billion tokens: an implementation that passes here can still do that.
    """
    lengths, tokens_per_step = zip(
        *((r.loss.steps[-1] - r.loss.steps[0] + 1, r.tokens_per_step) for r in runs), strict=True
    )
    tokens = max(tokens_per_step) * max(lengths)
    shown = f"{tokens:,.0f}"
    for size, word in ((1e6, "million"), (1e9, "billion")):
        if tokens >= size:
            shown = f"{tokens / size:.3g} {word}"
    seen = f"{shown} tokens a seed" if tokens else "tokens unknown"
    return (
        f"{max(lengths):,.0f} steps, {seen}: shows faults of the implementation, not that longer runs are safe. Instabilities "
        "of FP8 have been reported after 300 billion tokens."
    )


def _cooled(candidate: Runs, twin: Runs, control: Runs) -> Iterator[str]:
    """Whether the cool-down left a smaller late gap than training in FP8 to the end."""
    mine, theirs = (late_gaps(pair(runs, control)) for runs in (candidate, twin))
    if mine.size and theirs.size:
        after, before = float(mine.mean()), float(theirs.mean())
        word = "no larger than" if abs(after) <= abs(before) else "larger than"
        yield f"late gap after the cool-down {percent(after)}, {word} without it ({percent(before)})"


def late_gaps(pairs: Pairs) -> Vector:
    """By seed: gap of the last fifth of the steps, without spikes, relative to the control's mean loss there."""
    if not pairs.seeds:
        return np.zeros(0)
    mine, theirs = (
        ends(losses, int(_is_late(pairs.steps).sum())) for losses in (pairs.candidate, pairs.control)
    )
    return np.asarray((mine - theirs) / theirs.mean(), np.float64)


def heldout_gaps(pairs: Pairs) -> Vector | None:
    """By seed: gap of the final held-out loss, relative to the control's mean; None where some run has no such loss."""
    if pairs.heldout is None:
        return None
    mine, theirs = pairs.heldout
    return np.asarray((mine - theirs) / theirs.mean(), np.float64)


def _is_late(steps: Vector) -> NDArray[np.bool_]:
    return np.asarray(steps >= steps[-1] - LATE * (steps[-1] - steps[0]), bool)


def judge_other_seeds(other: Runs, control: Runs) -> Verdict:
    """Judges runs of other seeds by the wide band that the control's own seeds span; nothing is paired."""
    results = [finite(other, {}), judged("band", len(other), band, other, control)]
    missing = ", ".join(map(str, sorted(control.keys() - other.keys())))
    notes = [f"no run for seed {missing}"] * bool(missing)
    return conclude(results, notes, limits(other.values()), whole=not missing)


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
    late = _is_late(steps)
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
