"""Paired: runs of one seed that share weights and batches, judged by the one rule, and what only such runs allow.

A training loss is judged as anyone's curves are, with the differences of a seed as the statistic (`judge.judge`); its parts
are shown as gates. Runs that share everything but the arithmetic must be equal in both directions: a candidate that is
better by more than the margin fails too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge import gathered
from harness.judge.verdict.course import difference, ends
from harness.judge.verdict.curves import pair
from harness.judge.verdict.evidence import Evidence, LossRun
from harness.judge.verdict.gradients import gradients
from harness.judge.verdict.result import (
    LATE,
    MARGIN,
    MIN_POINTS,
    MIN_SEEDS,
    CannotTell,
    GateResult,
    Status,
    percent,
)
from harness.judge.verdict.rule import FAIL_CONFIDENCE, PASS_CONFIDENCE, CurveVerdict, Outcome, judge
from harness.store import stats

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


COPIED = {
    "copies",
    "barely_differs",
    "pairs_mixed",
}  # findings beside which a spread, and so a FAIL of the end, says nothing


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

    outcome: Outcome
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
        names = gathered((g.sentence, g.gate) for g in self.gates if g.status == decisive)
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
    found = None if not pairs.seeds else _curves(pairs, candidate, control, span[0], margin, excused)
    results = [finite(candidate, control)]
    for name, gate in (("L2", _bursts), ("L3", _course), ("L4", _late), ("L4h", _heldout), ("L5", _trend)):
        results.append(judged(name, len(pairs.seeds), gate, pairs, found, margin))
    if found and COPIED & {each.code for each in found.findings}:
        results = [
            replace(r, status="INCONCLUSIVE") if r.status == "FAIL" and r.gate != "L1" else r for r in results
        ]
    results.append(judged("L6", len(pairs.seeds), _norms, pairs, band, span))
    notes = [*pairs.problems, *(_against(found) if found else ())]
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
    outcome: Outcome = "PASS"
    if "FAIL" in statuses:
        outcome = "FAIL"
    elif "INCONCLUSIVE" in statuses or not whole:
        outcome = "INCONCLUSIVE"
    return Verdict(outcome, tuple(results), tuple(notes), limit)


def _curves(
    pairs: Pairs, candidate: Runs, control: Runs, start: float, margin: float, excused: Sequence[str]
) -> CurveVerdict:
    """The one rule on the training losses of whole pairs, from a step on; and on their held-out losses, where there are some."""
    inside = pairs.steps >= start
    late = _is_late(pairs.steps) & inside

    def runs(side: Runs, losses: Vector) -> list[LossRun]:
        found = []
        for seed, row in zip(pairs.seeds, losses, strict=True):
            series = {}
            if heldout := side[seed].heldout:
                import pandas as pd

                series["heldout_loss"] = pd.Series(heldout.values, index=heldout.steps)
            # a loss at step 0 precedes the first update: steps are counted by the updates that follow
            steps, last = pairs.steps[inside] + 1, float(pairs.steps[-1]) + 1
            found.append(LossRun(f"seed {seed}", steps, row[inside], last, seed=None, series=series))
        return found

    if not inside.any():
        inside = pairs.steps >= pairs.steps[-1]
    window = max(1, int(late.sum()))
    return judge(
        Evidence(
            runs(control, pairs.control),
            runs(candidate, pairs.candidate),
            True,
            margin,
            window,
            excused=excused,
        )
    )


def _against(found: CurveVerdict) -> Iterator[str]:
    """What the one rule finds beside the gates that show it."""
    shown = {code for codes in PARTS.values() for code in codes} | {"few_runs", "few_values"}
    yield from (f"{each.code}: {each.text}" for each in found.findings if each.code not in shown)


def _enough(pairs: Pairs, found: CurveVerdict | None) -> CurveVerdict:
    """What the one rule found; raises `CannotTell` where it could not look."""
    if len(pairs.seeds) < MIN_SEEDS:
        raise CannotTell(
            f"{len(pairs.seeds)} paired seeds; {MIN_SEEDS} are the least that has an interval, 5 the default"
        )
    if pairs.steps.size < MIN_POINTS or found is None:
        raise CannotTell(f"{pairs.steps.size} logged steps; fewer than {MIN_POINTS} can't be judged")
    if (inside := found.sides[0][0].steps.size) < MIN_POINTS:
        raise CannotTell(f"{inside} logged steps ran in FP8; fewer than {MIN_POINTS} can't be judged")
    if found.course is None:
        raise CannotTell("the control's loss is not above 0, so a gap relative to it says nothing")
    return found


def _said(found: CurveVerdict, gate: str) -> tuple[Status, str]:
    """The status of a gate that shows parts of the one rule, and what they say."""
    parts = [each for each in found.findings if each.code in PARTS[gate]]
    return ("INCONCLUSIVE" if parts else "PASS"), "".join(f"; {each.code}: {each.text}" for each in parts)


def _bursts(pairs: Pairs, found: CurveVerdict | None, margin: float) -> GateResult:
    """L2: no more spikes than the control has."""
    course = _enough(pairs, found).course
    assert found is not None
    assert course is not None
    theirs, mine = (side.sum(axis=1) for side in course.spikes)
    status, said = _said(found, "L2")
    excess = int(mine.sum() - theirs.sum())
    by_seed = ", ".join(f"{a}/{b}" for a, b in zip(mine, theirs, strict=True))
    sentence = f"losses above {100 * course.spike_limit:.2g} % of the loss: {mine.sum()} against {theirs.sum()} of the control (by seed {by_seed}){said}"
    return GateResult(
        "L2",
        "WARN" if status == "PASS" and excess > 0 else status,
        sentence,
        float(excess),
        seeds=mine.size,
        unit="spikes",
    )


def _course(pairs: Pairs, found: CurveVerdict | None, margin: float) -> GateResult:
    """L3: the gap lies within the margin all along the course; its figure is the mean gap of the first third."""
    course = _enough(pairs, found).course
    assert found is not None
    assert course is not None
    status, said = _said(found, "L3")
    early = slice(0, max(1, course.steps // 3))
    base, mine = (side[:, early].mean(axis=1) for side in course.shares)
    gap = difference(base, mine, paired=True)
    sentence = f"mean gap of the first third {percent(gap.difference)}; no piece of the course is shown beyond {percent(found.margin)[1:]}"
    if status != "PASS":
        sentence = f"mean gap of the first third {percent(gap.difference)}{said}"
    return _gap("L3", status, sentence, gap, base.size, found.margin)


def _late(pairs: Pairs, found: CurveVerdict | None, margin: float) -> GateResult:
    """L4: the end of the training loss lies within the margin."""
    course = _enough(pairs, found).course
    assert found is not None
    assert course is not None
    what = f"last {100 * LATE:.0f} % of the steps"
    return _equivalence("L4", what, course.end.ways[0], len(pairs.seeds), found.margin, course.end.interval)


def _heldout(pairs: Pairs, found: CurveVerdict | None, margin: float) -> GateResult:
    """L4, its other half: the final loss on the fixed held-out windows, by the same test."""
    found = _enough(pairs, found)
    gaps = heldout_gaps(pairs)
    if gaps is None:
        raise CannotTell("no held-out loss after the same step in every run")
    gap = difference(np.zeros(gaps.size), gaps, paired=True)
    return _equivalence("L4h", "held-out loss", gap, gaps.size, found.margin, gap.interval)


def _equivalence(
    gate: str,
    what: str,
    gap: Welch,
    seeds: int,
    margin: float,
    interval: Callable[[float], tuple[float, float]],
) -> GateResult:
    """PASS where the interval lies inside the margin; FAIL where the 99 % interval lies outside, on either side."""
    (low, high), (least, most) = interval(PASS_CONFIDENCE), interval(FAIL_CONFIDENCE)
    status: Status = "PASS" if -margin < low and high < margin else "INCONCLUSIVE"
    if least > margin or most < -margin:
        status = "FAIL"
    word = {
        "PASS": "equivalent",
        "FAIL": "worse" if gap.difference > 0 else "better: not the same arithmetic",
    }.get(status, "not shown")
    sentence = (
        f"{what}: gap {percent(gap.difference)}, {100 * PASS_CONFIDENCE:.0f} % interval {percent(low)} to {percent(high)}, margin "
        f"{percent(margin)[1:]}, {seeds} seeds: {word}"
    )
    return _gap(gate, status, sentence, gap, seeds, margin, (low, high))


def _trend(pairs: Pairs, found: CurveVerdict | None, margin: float) -> GateResult:
    """L5: the gap does not grow over the last half."""
    course = _enough(pairs, found).course
    assert found is not None
    assert course is not None
    slope, error, degrees = course.slope()
    gap = stats.Welch(float(slope), float(error), degrees)
    status, said = _said(found, "L5")
    low, high = gap.interval()
    sentence = f"slope {percent(gap.difference)} of the loss per e-fold of steps (95 % interval {percent(low)} to {percent(high)}){said}"
    return _gap("L5", status, sentence, gap, len(pairs.seeds), found.margin)


def _norms(pairs: Pairs, golden: Pairs | None, span: Span) -> GateResult:
    if len(pairs.seeds) < MIN_SEEDS:
        raise CannotTell(
            f"{len(pairs.seeds)} paired seeds; {MIN_SEEDS} are the least that has an interval, 5 the default"
        )
    return gradients(pairs, golden, span)


def _gap(
    gate: str,
    status: Status,
    sentence: str,
    gap: Welch,
    seeds: int,
    margin: float,
    interval: tuple[float, float] | None = None,
) -> GateResult:
    low, high = interval or gap.interval()
    return GateResult(
        gate,
        status,
        sentence,
        gap.difference,
        low,
        high,
        gap.error * math.sqrt(seeds),
        seeds,
        margin,
        "of the loss",
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
