"""Judge: a pure function of two sides of the store, a policy and a date."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.gate.cause import Cause, cause_of
from harness.gate.decide import FEWEST_TO_CLAIM, MOST_ROUNDS, Verdict, decide
from harness.gate.exit_code import Exit, GateError
from harness.gate.judged_metric import Unit
from harness.gate.loss import outcomes
from harness.gate.matching import match
from harness.gate.policy import Rule
from harness.gate.sides import mode_of, refuse_one_run
from harness.store import stats
from harness.store.compare import noise_floors
from harness.store.effect import MIN_ROUNDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.gate.decide import Decision
    from harness.gate.policy import Allowance, Policy
    from harness.gate.sides import Mode, Side
    from harness.store.effect import Effect
    from harness.store.stats import Vector

# Of the interval by which the control case is judged: it may invalidate a run in vain once in a hundred.
CONTROL_CONFIDENCE = 0.99
GROUP = "group"  # suite of the units that a policy's groups add


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one unit. `change`, `low`, `high` are ratios after / before of a timed one, > 1 = worse."""

    unit: Unit
    verdict: Verdict
    reason: str
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    limit: float = 0.0
    rounds: int = 0
    p: float = math.nan
    p_confirm: float = math.nan
    flagged: bool = False
    more: int | None = None
    cause: Cause | None = None
    allowed: Allowance | None = None
    expired: bool = False
    told_only: bool = False  # the policy has on_slower: warn
    looks_slower: bool = False  # undecided, and what was measured speaks against it
    effect: Effect | None = None  # of a timed unit: what the rounds show before any policy

    @property
    def policy(self) -> str:
        """In words, the policy of the gate that made a verdict of the effect; "" of what is not timed."""
        if self.effect is None:
            return ""
        return (
            f"policy of the gate: changes up to {self.limit:.1%} are tolerated (tolerance and, of stored runs, the spread "
            "between sessions), beyond that a t test over the rounds decides"
        )

    @property
    def is_time(self) -> bool:
        """Whether the verdict is one on a time, also one that was to be measured and is undecided without it."""
        return self.effect is not None or (self.unit.rule.rule == "timed" and bool(self.unit.undecided))

    @property
    def counts(self) -> bool:
        """Whether a regression speaks through the exit code."""
        return self.verdict is Verdict.REGRESSED and not self.held

    @property
    def suspect(self) -> bool:
        """Whether it is undecided and looks slower, so that silence about it would be approval."""
        return self.looks_slower and not self.held

    @property
    def held(self) -> bool:
        """Whether the policy keeps it from the exit code."""
        return self.told_only or (self.allowed is not None and not self.expired)


@dataclass(frozen=True, slots=True)
class Control:
    """What the control case says about the run."""

    moved: bool
    reason: str
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    rounds: int = 0


@dataclass(frozen=True)
class Judgement:
    """Everything that the gate found."""

    baseline: Side
    candidate: Side
    mode: Mode
    findings: tuple[Finding, ...]
    control: Control
    notes: tuple[str, ...]
    code: Exit
    date: datetime.date
    could_not_judge: bool = False  # see `_could_not_judge`

    @property
    def counted(self) -> Counter[str]:
        """How many units got each verdict."""
        return Counter(str(f.verdict) for f in self.findings)

    @property
    def to_confirm(self) -> tuple[str, ...]:
        """Ids of the cases that must be measured again before they are reported."""
        return tuple(sorted({i for f in self.findings if f.flagged for i in f.unit.cases}))

    @property
    def times(self) -> tuple[Finding, ...]:
        """Findings about times that speak through the exit code; none where only exact rules are judged."""
        if self.mode == "machine-free":
            return ()
        return tuple(f for f in self.findings if f.is_time and not f.told_only)

    @property
    def undecided(self) -> tuple[Finding, ...]:
        """Those of `times` that are INCONCLUSIVE."""
        return tuple(f for f in self.times if f.verdict is Verdict.INCONCLUSIVE)

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """Findings that are undecided and look slower; the slowest first."""
        return tuple(sorted((f for f in self.findings if f.suspect), key=lambda f: -f.change))


def judge(
    baseline: Side,
    candidate: Side,
    policy: Policy,
    *,
    machine_free: bool = False,
    today: datetime.date | None = None,
) -> Judgement:
    """Judges every unit that both sides have, and every one that only the baseline has.

    Args:
        baseline: what the candidate must not fall behind.
        candidate: what is judged.
        policy: tolerances, groups, allowances.
        machine_free: judge only what no machine changes, and ratios within one kind of device.
        today: the day by which allowances expire; UTC by default.

    Raises:
        GateError: the environments differ (exit 3), one run is on both sides (2), or nothing can be judged: no case is
            common, none was sound (5).
    """
    refuse_one_run(baseline, candidate)
    date = today or datetime.datetime.now(datetime.UTC).date()
    mode = mode_of(baseline, candidate, machine_free=machine_free)
    matched = match(baseline, candidate, mode, policy)
    notes = list(matched.notes)
    if not matched.control.size and mode == "stored":
        notes.append("no control case in both runs: a slow machine cannot be distinguished from slow code")
    control = _judge_control(matched.control, policy)
    timed = [u for u in matched.units if u.is_sound_time]
    groups = _group_units(timed, policy)
    timed += groups
    spread = 0.0 if mode == "paired" else policy.session_spread
    limits = [math.log1p(u.rule.tolerance) + math.log1p(spread) for u in timed]
    floors = [noise_floors(side.first) for side in (baseline, candidate)]
    decisions = decide(
        [u.first for u in timed],
        [u.second for u in timed],
        limits,
        policy.alpha,
        policy.alpha_confirm,
        control=matched.control if np.isfinite(matched.control).all() else None,
        scatter=policy.scatter if mode != "paired" else 0.0,
        fresh=baseline.fresh and candidate.fresh,
        groups=len(groups),
        floors=[max((f[u.case_id] for f in floors if u.case_id in f), default=math.nan) for u in timed],
    )
    findings = [
        replace(_timed(unit, decision, limit, control), told_only=policy.on_slower == "warn")
        for unit, decision, limit in zip(timed, decisions, limits, strict=True)
    ]
    findings += [
        _missing(u, policy) if u.trouble or u.undecided else _exact(u)
        for u in matched.units
        if not u.is_sound_time
    ]
    findings += [
        Finding(o.unit, o.verdict, o.reason) for o in outcomes(baseline.first, candidate.first, policy)
    ]
    if all(f.unit.failed_twice for f in findings):
        why = "; ".join(notes) or "the policy ignores every metric that both hold"
        raise GateError(
            Exit.NO_BASELINE,
            f"nothing in {baseline.name} and {candidate.name} can be judged, which is no pass: {why}",
        )
    findings = [_with_allowance(f, policy, date) for f in findings]
    notes += [
        f"the allowance for {f.unit.case}, {f.unit.arm} ended on {f.allowed.until}: {f.allowed.reason}"
        for f in findings
        if f.expired and f.allowed is not None
    ]
    better = sum(f.unit.rule.rule == "exact" and f.verdict is Verdict.IMPROVED for f in findings)
    if better and mode != "paired":  # of two commits measured here, the next base is this one
        notes.append(
            f"{better} exact counts improved; a new baseline holds them (in this repository: make gate ARGS=update), and "
            "from then on a return is a regression"
        )
    found = Judgement(baseline, candidate, mode, tuple(findings), control, tuple(notes), Exit.OK, date)
    found = replace(found, could_not_judge=_could_not_judge(found, policy))
    return replace(found, code=_code(found, policy))


def _judge_control(logs: Vector, policy: Policy) -> Control:
    if not np.isfinite(logs).all():
        return Control(True, "the control case has an invalid time, so no time is judged; measure again")
    if logs.size < MIN_ROUNDS:
        return Control(False, f"{logs.size} rounds of a control case: not judged", rounds=int(logs.size))
    mean, (low, high) = float(logs.mean()), stats.t_interval(logs, CONTROL_CONFIDENCE)
    figures = (math.exp(mean), math.exp(low), math.exp(high), int(logs.size))
    # Noise alone may carry the mean over the line; a machine that moved does so beyond its own noise.
    moved = abs(mean) > math.log1p(policy.control) and not low <= 0 <= high
    where = f"{math.expm1(mean):+.1%} ({math.expm1(low):+.1%} to {math.expm1(high):+.1%})"
    if moved:
        return Control(
            True,
            f"the control case moved by {where}, more than {policy.control:.1%}: the machine changed between the "
            "two sides, so no time is judged; measure again",
            *figures,
        )
    return Control(False, f"the control case stayed: {where}", *figures)


def _group_units(units: Sequence[Unit], policy: Policy) -> list[Unit]:
    """One unit a group that is judged together: round by round, the mean of its members."""
    out = []
    for group in policy.groups:
        members = [
            u
            for u in units
            if group.together and group.match.fits(u.fields) and u.first.size and not u.excluded
        ]
        if len(members) < 2:
            continue
        whole = [u for u in members if u.first.size == members[0].first.size]
        again = [u.second for u in whole if u.second.size]
        tolerance = group.tolerance if group.tolerance is not None else min(u.rule.tolerance for u in whole)
        unit = Unit(
            *(GROUP, "", f"{group.name} ({len(whole)} units)", "all", "mean", "", ""),
            unit="",
            better="lower",
            rule=Rule("timed", tolerance),
            first=np.mean([u.first for u in whole], axis=0),
            members=tuple(sorted({u.case_id for u in whole})),
        )
        if len(again) == len(whole) and len({len(s) for s in again}) == 1:
            unit.second = np.mean(again, axis=0)
        out.append(unit)
    return out


def _timed(unit: Unit, decision: Decision, limit: float, control: Control) -> Finding:
    verdict = decision.verdict
    reason = _why(decision, limit)
    cause = None
    if unit.excluded:
        verdict, reason = Verdict.INCONCLUSIVE, unit.excluded
    if unit.strayed:
        reason += f"; {unit.strayed} samples were taken at another clock than their round"
    if control.moved:
        verdict, reason = Verdict.INCONCLUSIVE, "the control case moved"
    if verdict is Verdict.REGRESSED or (control.moved and decision.verdict is Verdict.REGRESSED):
        cause = cause_of(unit, decision.mean, math.log(control.change) if control.change > 0 else math.nan)
    return Finding(
        unit,
        verdict,
        reason,
        change=math.exp(decision.mean),
        low=math.exp(decision.low),
        high=math.exp(decision.high),
        limit=math.expm1(limit),
        rounds=decision.rounds,
        p=decision.p,
        p_confirm=decision.p_confirm,
        flagged=decision.flagged and not unit.excluded,
        more=decision.more,
        cause=cause,
        effect=decision.effect,
        looks_slower=verdict is Verdict.INCONCLUSIVE and not control.moved and decision.suspect,
    )


def _why(d: Decision, limit: float) -> str:
    """What decided, or what would."""
    bar = f"{math.expm1(limit):.1%}"
    if d.rounds < MIN_ROUNDS:
        return f"{d.rounds} rounds; a verdict needs at least {MIN_ROUNDS}, and {d.more} more would do"
    if d.verdict is Verdict.INCONCLUSIVE and d.low > limit and d.rounds < FEWEST_TO_CLAIM:
        return (
            f"slower by more than {bar} in {d.rounds} rounds; to call it a regression takes {FEWEST_TO_CLAIM}"
        )
    if d.verdict in (Verdict.REGRESSED, Verdict.IMPROVED):
        test = f"p {d.p:.3g}" + (
            "" if math.isnan(d.p_confirm) else f", confirmed on fresh data p {d.p_confirm:.2g}"
        )
        return f"{'slower' if d.mean > 0 else 'faster'} by more than {bar}: {test}"
    if d.verdict is Verdict.OK:
        slower = "slower, and tolerated: " if d.effect.direction == "slower" else ""
        return f"{slower}at most {math.expm1(d.high):+.1%}, below {bar}"
    again = ""
    if d.flagged and not math.isnan(d.p_confirm):
        again = f"; flagged, and {d.fresh} fresh rounds did not confirm it (p {d.p_confirm:.2g})"
    if d.apart:
        return (
            "one process a side cannot tell a change from how it was born, in however many rounds: measure both "
            f"together (--against){again}"
        )
    if d.more is None:
        return f"the difference between change and tolerance is below the noise: over {MOST_ROUNDS} rounds{again}"
    return f"about {d.more} more rounds would settle it{again}"


def _missing(unit: Unit, policy: Policy) -> Finding:
    if unit.undecided:
        told_only = unit.rule.rule == "timed" and policy.on_slower == "warn"
        return Finding(unit, Verdict.INCONCLUSIVE, unit.undecided, told_only=told_only)
    return Finding(
        unit,
        Verdict.REGRESSED,
        f"{unit.trouble}: what cannot be compared is no pass",
        cause=None if unit.invalid else Cause("missing", ""),
    )


def _exact(unit: Unit) -> Finding:
    """One number against another; no statistics."""
    allowed = unit.rule.tolerance * abs(unit.before) + unit.rule.absolute
    if unit.before == unit.after:
        worse = 0.0
    elif math.isinf(unit.before) or math.isinf(unit.after):
        worse, allowed = unit.worse * (unit.after - unit.before), 0.0
    else:
        worse = unit.worse * (unit.after - unit.before)
    figures = f"{unit.before:.6g} -> {unit.after:.6g} {unit.unit}"
    if worse > allowed:
        return Finding(unit, Verdict.REGRESSED, f"{figures}; {allowed:.3g} is tolerated")
    if worse < -allowed:
        return Finding(unit, Verdict.IMPROVED, figures)
    return Finding(unit, Verdict.OK, figures)


def _with_allowance(finding: Finding, policy: Policy, date: datetime.date) -> Finding:
    if finding.verdict is not Verdict.REGRESSED and not finding.looks_slower:
        return finding
    allowed = policy.allowance(finding.unit.fields)
    if allowed is None:
        return finding
    return replace(finding, allowed=allowed, expired=allowed.until < date)


def _could_not_judge(found: Judgement, policy: Policy) -> bool:
    """Whether silence would read as approval.

    So it would where a unit looks slower, where nothing at all was decided, where no time was, or where more times stayed
    open, or more arms failed on both sides, than the policy puts up with.
    """
    open_times, times = len(found.undecided), len(found.times)
    arms = {(f.unit.case_id, f.unit.arm) for f in found.findings if f.unit.suite != GROUP}
    failed = sum(f.unit.failed_twice for f in found.findings)
    return (
        bool(found.suspects)
        or failed > policy.undecided_share * len(arms)
        or all(f.verdict is Verdict.INCONCLUSIVE for f in found.findings)
        or (bool(times) and (open_times == times or open_times > policy.undecided_share * times))
    )


def _code(found: Judgement, policy: Policy) -> Exit:
    """What is certain speaks first: numerics, then what was counted, then the machine, then the clock."""
    regressed = [f for f in found.findings if f.counts]
    if any(_is_numerics(f) for f in regressed):
        return Exit.NUMERICS
    if any(f.unit.rule.rule == "exact" or f.unit.trouble for f in regressed):
        return Exit.REGRESSED
    if found.control.moved:
        return Exit.INVALID
    if regressed:
        return Exit.REGRESSED
    if found.suspects:  # a policy may put up with what is open, not with what speaks against the change
        return Exit.INCONCLUSIVE
    undecided = any(f.verdict is Verdict.INCONCLUSIVE for f in found.findings)
    if undecided and policy.on_inconclusive == "fail":
        return Exit.INCONCLUSIVE
    return Exit.INCONCLUSIVE if found.could_not_judge and policy.on_inconclusive == "share" else Exit.OK


def _is_numerics(finding: Finding) -> bool:
    unit = finding.unit
    return unit.wrong if unit.trouble else unit.rule.rule == "numerics"
