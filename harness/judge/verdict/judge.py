"""Judge: all gates of one candidate, and the verdict that follows from them: PASS, FAIL or INCONCLUSIVE.

FAIL: some gate failed. PASS: every gate passed or warned (warnings are shown) and no condition is violated. Anything else is
INCONCLUSIVE: what could not be tested is never passed in silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.judge import gathered
from harness.judge.verdict import gates
from harness.judge.verdict.curves import ema, half_life, pair
from harness.judge.verdict.result import LATE, MARGIN, MIN_POINTS, MIN_SEEDS, percent
from harness.judge.verdict.spike_events import calm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from harness.judge.verdict.curves import Run, Runs
    from harness.judge.verdict.gates import Evidence
    from harness.judge.verdict.result import GateResult

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
FIRST = 0.1  # of the steps: where the control begins
AS_MEASURED = 0.1  # steps of a half-life that smooths nothing
LEAST_FALL = 20.0  # margins by which the control's loss has to fall: a gap is to be little of that, too


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
) -> Verdict:
    """Judges a candidate against the control that shares its initial weights and batches, seed by seed.

    Args:
        candidate: runs by seed. Runs with a `switch_step` are a precision pattern and need `twin`.
        control: runs by seed, of the arm whose loss is the right one.
        golden: runs of the emulation of the candidate's recipe; they set the band of the early window, and the
            candidate's gradient norms are compared with theirs.
        twin: of a precision pattern, the runs that must be bitwise equal until the switch. Where it is the control
            itself (warm-up), the early window and the gradient norms start at the switch;
            where it is another arm (cool-down), they end there.
        twin_name: what to call that arm.
        margin: of equivalence, relative to the control's mean loss.

    Raises:
        ValueError: the margin is not above 0, or there is no run on one side.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin} must be above 0; 0.0025 is 0.25 % of the control's loss")
    if not candidate or not control:
        raise ValueError(f"{len(candidate)} candidate and {len(control)} control runs: both sides need some")
    switches = [run.switch_step for run in candidate.values() if run.switch_step is not None]
    back = [run.switch_back_step for run in candidate.values() if run.switch_back_step is not None]
    span = gates.WHOLE
    if switches and twin is control:
        span = float(max(switches)), float(min(back, default=math.inf))
    elif switches and twin:
        span = gates.WHOLE[0], float(min(switches))
    band = pair(golden, control, "golden arm") if golden else None
    evidence = gates.Evidence(candidate, control, calm(pair(candidate, control)), band, margin, span)
    results = list(gates.results(evidence))
    failed = any(r.status == "FAIL" for r in results)
    withheld = [why for condition in CONDITIONS for why in condition(evidence)]
    withheld += [] if failed else swinging(evidence)
    notes = list(withheld)
    if switches:
        results.append(gates.judged("prefix", len(candidate), gates.prefix, candidate, twin or {}, twin_name))
        if twin and twin is not control:
            notes += _cooled(candidate, twin, control)
    if band is not None:
        notes += [problem for problem in band.problems if problem not in notes]
        if len(band.seeds) < MIN_SEEDS:
            notes.append(f"{len(band.seeds)} golden runs are too few for a band: the fixed band is used")
    return conclude(results, notes, limits({**control, **candidate}.values()), whole=not withheld)


def judge_other_seeds(other: Runs, control: Runs) -> Verdict:
    """Judges runs of other seeds by the wide band that the control's own seeds span; nothing is paired."""
    results = [gates.finite(other, {}), gates.judged("band", len(other), gates.band, other, control)]
    missing = ", ".join(map(str, sorted(control.keys() - other.keys())))
    notes = [f"no run for seed {missing}"] * bool(missing)
    return conclude(results, notes, limits(other.values()), whole=not missing)


def conclude(
    results: Sequence[GateResult], notes: Iterable[str], limit: str, *, whole: bool = True
) -> Verdict:
    """The verdict that follows from the gates; `whole`: no condition is violated."""
    statuses = {r.status for r in results}
    outcome: Outcome = "PASS"
    if "FAIL" in statuses:
        outcome = "FAIL"
    elif "INCONCLUSIVE" in statuses or not whole:
        outcome = "INCONCLUSIVE"
    return Verdict(outcome, tuple(results), tuple(notes), limit)


def unpaired(evidence: Evidence) -> Iterator[str]:
    """Every run has a partner that read the same batches and can be compared with it step by step."""
    yield from evidence.pairs.problems


def idle(evidence: Evidence) -> Iterator[str]:
    """The control learns: its loss falls by many margins; if not, weights that hardly change would be equivalent to it.

    Medians, of the first tenth and the last fifth of the steps, so that a spike decides nothing.
    """
    pairs, margin = evidence.pairs, evidence.margin
    if not pairs.seeds or pairs.steps.size < MIN_POINTS:
        return
    share = (pairs.steps - pairs.steps[0]) / (pairs.length - 1)
    first, last = (np.median(pairs.control[:, at], axis=1) for at in (share <= FIRST, share >= 1 - LATE))
    fall = float((first - last).mean() / np.abs(last).mean())
    if not fall > LEAST_FALL * margin:
        yield (
            f"the control's loss {'falls' if fall >= 0 else 'rises'} by {percent(abs(fall))[1:]}; under {LEAST_FALL:g} margins, "
            f"{percent(LEAST_FALL * margin)[1:]}, PASS would say little: train for longer, or take a smaller margin"
        )


# What must hold of the runs for a PASS, whatever the gates say: each yields what is violated, and each of these is a note.
CONDITIONS: tuple[Callable[[Evidence], Iterator[str]], ...] = (unpaired, idle)


def swinging(evidence: Evidence) -> Iterator[str]:
    """The gap keeps its level after the early window, as its mean does not say: runs that share their batches differ by less
    than the control's own noise between seeds, or than the margin, as measured and smoothed."""
    pairs, (start, end) = evidence.pairs, evidence.span
    early = pairs.steps[:1] + min(gates.EARLY_STEPS, gates.EARLY_SHARE * pairs.length)
    inside = (pairs.steps >= np.maximum(early, start)) & (pairs.steps < end)
    if len(pairs.seeds) < MIN_SEEDS or not inside.any():
        return
    own = (pairs.control - np.roll(pairs.control, 1, axis=0)) / math.sqrt(2)
    for life in AS_MEASURED, half_life(pairs.length):
        spread, noise = (
            math.sqrt(ema(curve, pairs.steps, life)[:, inside].var(axis=1).mean())
            for curve in (evidence.calm.gap, own)
        )
        limit = max(noise, evidence.margin * pairs.control[:, inside].mean())
        if spread > limit:
            yield (
                f"the gap, smoothed by {life:g} steps, varies within a run by {spread:.3g} nats (sd), beyond {limit:.3g}, the "
                "control's own noise or the margin: it swings around its mean"
            )
            return


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
    mine, theirs = (gates.late_gaps(calm(pair(runs, control))) for runs in (candidate, twin))
    if mine.size and theirs.size:
        after, before = float(mine.mean()), float(theirs.mean())
        word = "no larger than" if abs(after) <= abs(before) else "larger than"
        yield f"late gap after the cool-down {percent(after)}, {word} without it ({percent(before)})"
