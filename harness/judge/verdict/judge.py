"""Judge: all gates of one candidate, and the verdict that follows from them: PASS, FAIL or INCONCLUSIVE.

FAIL: some gate failed. PASS: every gate passed or warned (warnings are shown) and every run had its partner. Anything else is
INCONCLUSIVE: what could not be tested is never passed in silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.judge.verdict import breaks, gates, gradients, patterns
from harness.judge.verdict.curves import pair
from harness.judge.verdict.result import MARGIN, MIN_SEEDS, percent
from harness.judge.verdict.spike_events import calm
from harness.judge.verdict.trend import trend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.judge.verdict.curves import Run
    from harness.judge.verdict.result import GateResult
    from harness.judge.verdict.settle import Settled

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one candidate.

    Attributes:
        outcome: PASS, FAIL or INCONCLUSIVE.
        gates: one result a gate, in the order of `GATES`.
        notes: what a reader must know beside the gates: missing controls, runs that had no partner.
        limits: what runs of this length cannot certify, with their steps and tokens.
        settled: from which step on the gap stays within the noise; None where nobody asked. It decides nothing.
        not_fp8: why FP8 cannot have run; "" where nothing speaks against it. Also among the notes.
    """

    outcome: Outcome
    gates: tuple[GateResult, ...]
    notes: tuple[str, ...]
    limits: str
    settled: Settled | None = None
    not_fp8: str = ""

    def gate(self, name: str) -> GateResult | None:
        """The result of one gate; None where it does not apply."""
        return next((g for g in self.gates if g.gate == name), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The gates that decided, or the warnings of a PASS, as "L4: sentence"; those that say the same, in one."""
        decisive = {"FAIL": ("FAIL",), "INCONCLUSIVE": ("INCONCLUSIVE",), "PASS": ("WARN",)}[self.outcome]
        gates: dict[str, list[str]] = {}
        for g in self.gates:
            if g.status in decisive:
                gates.setdefault(g.sentence, []).append(g.gate)
        return tuple(f"{', '.join(names)}: {sentence}" for sentence, names in gates.items())


def judge_pairs(
    candidate: Mapping[int, Run],
    control: Mapping[int, Run],
    *,
    golden: Mapping[int, Run] | None = None,
    twin: Mapping[int, Run] | None = None,
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
    pairs = pair(candidate, control)
    switches = {run.switch_step for run in candidate.values()} - {None}
    warm_up = twin is control and bool(switches)
    span = gates.WHOLE
    if warm_up:
        back = [run.switch_back_step for run in candidate.values() if run.switch_back_step is not None]
        span = (float(max(s for s in switches if s is not None)), float(min(back, default=math.inf)))
    elif switches and twin:
        span = (0.0, float(min(s for s in switches if s is not None)))
    band = pair(golden, control, "golden arm") if golden else None
    without_spikes = calm(pairs)
    results = [
        breaks.finite(candidate, control),
        breaks.spikes(without_spikes),
        # The golden arm has no warm-up; right after one its gap is no measure.
        gates.early_window(without_spikes, None if warm_up or band is None else calm(band), span),
        gates.late_window(without_spikes, margin, span[0]),
        gates.heldout(without_spikes, margin),
        trend(without_spikes, margin, span[0]),
        gradients.gradients(pairs, band, span),
    ]
    notes = list(pairs.problems)
    idle = breaks.idle(pairs, margin)
    if idle:
        notes.append(idle)
    if switches:
        results.append(patterns.prefix(candidate, twin or {}, twin_name))
        if twin and not warm_up:
            notes += _cooled(candidate, twin, control)
    if band is not None:
        notes += [problem for problem in band.problems if problem not in notes]
    if band is not None and len(band.seeds) < MIN_SEEDS:
        notes.append(f"{len(band.seeds)} golden runs are too few for a band: the fixed band is used")
    return conclude(results, notes, limits({**control, **candidate}), whole=not pairs.problems and not idle)


def judge_other_seeds(other: Mapping[int, Run], control: Mapping[int, Run]) -> Verdict:
    """Judges runs of other seeds by the wide band that the control's own seeds span; nothing is paired."""
    results = [breaks.finite(other, {}), patterns.seed_band(other, control)]
    missing = sorted(control.keys() - other.keys())
    notes = [f"no run for seed {', '.join(map(str, missing))}"] if missing else []
    return conclude(results, notes, limits(other), whole=not missing)


def conclude(results: list[GateResult], notes: list[str], limit: str, *, whole: bool = True) -> Verdict:
    """The verdict that follows from the gates; `whole`: every run had its partner, and the control learned."""
    statuses = {r.status for r in results}
    outcome: Outcome = "PASS"
    if "FAIL" in statuses:
        outcome = "FAIL"
    elif "INCONCLUSIVE" in statuses or not whole:
        outcome = "INCONCLUSIVE"
    return Verdict(outcome, tuple(results), tuple(notes), limit)


def limits(runs: Mapping[int, Run]) -> str:
    """What runs of this length cannot certify, in numbers.

    DeepSeek-V3 (arXiv 2412.19437, appendix B.2) reports that blockwise quantised activation gradients diverged after
    about 300 billion tokens: an implementation that passes here can still do that.
    """
    steps = max(run.loss.steps[-1] - run.loss.steps[0] + 1 for run in runs.values())
    tokens = max(run.tokens_per_step for run in runs.values()) * steps
    seen = f"{steps:,.0f} steps" + (f", {_tokens(tokens)} tokens a seed" if tokens else ", tokens unknown")
    return (
        f"{seen}: shows faults of the implementation, not that longer runs are safe. Instabilities of FP8 have been "
        "reported after 300 billion tokens."
    )


def _tokens(count: float) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"


def _cooled(candidate: Mapping[int, Run], twin: Mapping[int, Run], control: Mapping[int, Run]) -> list[str]:
    """Whether the cool-down left a smaller late gap than training in FP8 to the end."""
    mine, theirs = (gates.late_gaps(calm(pair(runs, control))) for runs in (candidate, twin))
    if not mine.size or not theirs.size:
        return []
    word = "no larger than" if abs(mine.mean()) <= abs(theirs.mean()) else "larger than"
    from_text, to_text = percent(float(theirs.mean())), percent(float(mine.mean()))
    return [f"late gap after the cool-down {to_text}, {word} without it ({from_text})"]
