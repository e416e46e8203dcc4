"""Judge: a pure function of two sides of the store, a policy and a date.

Of training it holds what the loss verdict (`harness.judge.verdict`) says of the candidate's runs. The verdict compares each
arm with the control of its own set-up, so no machine, clock or commit enters it, and the baseline only tells what was there
before:

| the candidate's arm | finding |
|---|---|
| FAIL | REGRESSED, exit 4, also where the baseline failed: an arm that never trained does not pass |
| INCONCLUSIVE | INCONCLUSIVE |
| PASS | OK; IMPROVED where the baseline's FAILed |

A run that the baseline alone has is lost, as every other row (`matching`). The negative control is broken on purpose. It has
to FAIL; where it does not, this set-up could not have seen a fault in any arm, and that is INCONCLUSIVE.
"""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from harness.gate.decide import FEWEST_TO_CLAIM, MOST_ROUNDS, UnitVerdict, decide
from harness.gate.figures import SUITE as FIGURES
from harness.gate.figures import doubt
from harness.gate.matching import LOSS, OPERATORS, match, number
from harness.gate.options import Exit, GateError
from harness.gate.policy import MetricRule
from harness.gate.sides import mode_of, refuse_one_run
from harness.gate.unit import RATIO, ControlCase, Judgement, SlowdownCause, Unit, UnitKey, UnitState
from harness.judge import verdict
from harness.judge.verdict.rows import SUITE
from harness.store import stats
from harness.store.compare import noise_floors
from harness.store.outside import parse
from harness.store.rows import grouped
from harness.store.stats import MIN_ROUNDS
from harness.store.text import case_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from harness.gate.decide import UnitDecision
    from harness.gate.policy import Policy
    from harness.gate.sides import Side
    from harness.judge.verdict import ArmVerdict
    from harness.store.stats import Vector


COMPILE_FACTS = ("compile_graphs", "compile_graph_breaks", "recompiles")


def cause_of(unit: Unit, change: float, control: float) -> SlowdownCause | None:
    """Why a timed unit became slower; None where no row says anything about it.

    Args:
        unit: a unit with its rows.
        change: its mean log ratio, positive = slower.
        control: the control case's mean log ratio; NaN where there is none.
    """
    if change > 0 and control >= change / 2:
        return SlowdownCause("control", f"the control case is {_percent(control)} slower too")
    cycles = _cycles(unit, change)
    if cycles is not None and change > 0 and cycles < change / 2:
        return SlowdownCause(
            "clock", f"time {_percent(change)}, cycles {_percent(cycles)}, so the clock fell"
        )
    counted = "" if cycles is None else f"; cycles {_percent(cycles)}"
    if unit.key.metric == "compile_s":
        return SlowdownCause("compile", f"compile time {_percent(change)}")
    old, new = (parse(rows[0].resolved) for rows in unit.rows)
    counts = {name: (number(old.get(name)), number(new.get(name))) for name in (*COMPILE_FACTS, OPERATORS)}
    for name, (was, now) in counts.items():
        if now > was and name == OPERATORS:
            return SlowdownCause("host", f"operators called {was:g} -> {now:g}{counted}")
        if now > was:
            return SlowdownCause("compile", f"{name} {was:g} -> {now:g}")
    if unit.key.metric == "launch_us":
        return SlowdownCause("host", f"launching kernels takes longer{counted}")
    known = not any(map(math.isnan, counts[OPERATORS]))
    if not known and cycles is None:
        return None  # nothing was counted, so nothing speaks for the kernel
    same = "the same operators were called" if known else "calls were not counted"
    others = "; other kernels ran" if old.get("kernels") != new.get("kernels") else ""
    return SlowdownCause("kernel", same + counted + others)


def _cycles(unit: Unit, change: float) -> float | None:
    """log(cycles after / cycles before), by the median clocks; None where one was not read for every sample, and of a ratio of arms.

    The clocks of such a unit are those of its arm alone, and what changes both arms changes no ratio.
    """
    if unit.key.regime == RATIO:
        return None
    sides = [[row.sample_clock_mhz for row in rows if row.sample_clock_mhz is not None] for rows in unit.rows]
    clocks = [np.concatenate([np.empty(0), *side]) for side in sides]
    samples = [sum(len(row.samples) for row in rows) for rows in unit.rows]
    if [side.size for side in clocks] != samples or not all((side > 0).all() for side in clocks):
        return None
    before, after = map(float, map(np.median, clocks))
    return change + math.log(after / before)


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(log_ratio):+.1%}"


# Of the interval by which the control case is judged: it may invalidate a run in vain once in a hundred.
CONTROL_CONFIDENCE = 0.99


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
    notes = matched.notes
    if any(
        u.key.suite == FIGURES and u.rows[1] and "unit" not in parse(u.rows[1][0].resolved)
        for u in matched.units
    ):
        notes.append("figures without a unit are taken as seconds, lower is better")
    if not matched.control.size and mode == "stored":
        notes.append("no control case in both runs: a slow machine cannot be distinguished from slow code")
    control = _judge_control(matched.control, policy)
    timed = [u for u in matched.units if u.is_sound_time]
    apart = mode != "paired"
    spread = math.log1p(policy.session_spread) if apart else 0.0
    limits = [math.log1p(u.rule.tolerance) + spread for u in timed]
    floors = [noise_floors(side.first) for side in (baseline, candidate)]
    decisions = decide(
        [u.first for u in timed],
        [u.second for u in timed],
        limits,
        policy.alpha,
        policy.alpha_confirm,
        control=matched.control if np.isfinite(matched.control).all() else None,
        scatter=policy.scatter if apart else 0.0,
        fresh=baseline.fresh and candidate.fresh,
        ticks=[u.tick for u in timed],
        looks=max(baseline.looks, candidate.looks),
        floors=[max((f[i] for f in floors if (i := u.key.case_id) in f), default=math.nan) for u in timed],
    )
    for unit, decision, limit in zip(timed, decisions, limits, strict=True):
        _judge_time(unit, decision, limit, control)
    doubt(timed, policy, date, paired=mode == "paired")
    for unit in matched.units:
        if not unit.is_sound_time:
            _judge_value(unit)
    units = [*matched.units, *_trained(baseline.first, candidate.first, policy)]
    if all(u.state is UnitState.FAILED_TWICE for u in units):
        why = "; ".join(notes) or "the policy ignores every metric that both hold"
        raise GateError(
            Exit.NO_BASELINE,
            f"nothing in {baseline.name} and {candidate.name} can be judged, which is no pass: {why}",
        )
    for unit in units:
        _hold(unit, policy, date)
    notes += [
        f"the allowance for {u.case}, {u.key.arm} ended on {u.allowed.until}: {u.allowed.reason}"
        for u in units
        if u.expired and u.allowed is not None
    ]
    better = sum(u.rule.rule == "exact" and u.verdict is UnitVerdict.IMPROVED for u in units)
    if better and apart:  # of two commits measured here, the next base is this one
        notes.append(
            f"{better} exact counts improved; a new baseline holds them (in this repository: make gate ARGS=update), and "
            "from then on a return is a regression"
        )
    found = Judgement(baseline, candidate, mode, tuple(units), control, tuple(notes), Exit.OK, date)
    found = replace(found, could_not_judge=_could_not_judge(found, policy))
    return replace(found, code=_code(found, policy))


def _judge_control(logs: Vector, policy: Policy) -> ControlCase:
    if not np.isfinite(logs).all():
        return ControlCase(
            True, "the control case failed or has an invalid time, so no time is judged; measure again"
        )
    if logs.size < MIN_ROUNDS:
        return ControlCase(False, f"{logs.size} rounds of a control case: not judged", rounds=logs.size)
    mean, (low, high) = logs.mean(), stats.t_interval(logs, CONTROL_CONFIDENCE)
    # Noise alone may carry the mean over the line; a machine that moved does so beyond its own noise.
    moved = bool(abs(mean) > math.log1p(policy.control)) and not low <= 0 <= high
    where = f"{math.expm1(mean):+.1%} ({math.expm1(low):+.1%} to {math.expm1(high):+.1%})"
    reason = f"the control case stayed: {where}"
    if moved:
        reason = (
            f"the control case moved by {where}, more than {policy.control:.1%}: the machine changed between the "
            "two sides, so no time is judged; measure again"
        )
    return ControlCase(moved, reason, math.exp(mean), math.exp(low), math.exp(high), logs.size)


def _judge_time(unit: Unit, decision: UnitDecision, limit: float, control: ControlCase) -> None:
    unit.decision, unit.limit = decision, math.expm1(limit)
    if unit.state is not UnitState.EXCLUDED:
        unit.found(decision.verdict, _why(decision, limit))
    if decision.verdict is UnitVerdict.REGRESSED and (control.moved or unit.verdict is UnitVerdict.REGRESSED):
        moved_by = math.log(control.change) if control.change > 0 else math.nan
        unit.cause = cause_of(unit, decision.effect.log, moved_by)
    if decision.verdict is UnitVerdict.INCONCLUSIVE and unit.tick > limit:
        unit.reason = (
            f"the clock moves in steps of {math.expm1(unit.tick):.1%} of this time: measure something longer"
        )
    if control.moved:
        unit.found(UnitVerdict.INCONCLUSIVE, "the control case moved")
    elif unit.verdict is UnitVerdict.INCONCLUSIVE:
        unit.looks_slower = decision.suspect


def _why(d: UnitDecision, limit: float) -> str:
    """What decided, or what would."""
    bar, rounds, confirmed = f"{math.expm1(limit):.1%}", d.effect.rounds, not math.isnan(d.p_confirm)
    if rounds < MIN_ROUNDS:
        return f"{rounds} rounds; a verdict needs at least {MIN_ROUNDS}, and {d.more} more would do"
    if d.verdict in (UnitVerdict.REGRESSED, UnitVerdict.IMPROVED):
        way = "slower" if d.effect.log > 0 else "faster"
        fresh = f", confirmed on fresh data p {d.p_confirm:.2g}" if confirmed else ""
        return f"{way} by more than {bar}: p {d.p:.3g}{fresh}"
    if d.verdict is UnitVerdict.OK:
        slower = "slower, and tolerated: " if d.effect.direction == "slower" else ""
        return f"{slower}at most {_percent(d.high)}, below {bar}"
    if d.low > limit and rounds < FEWEST_TO_CLAIM:
        return (
            f"slower by more than {bar} in {rounds} rounds; to call it a regression takes {FEWEST_TO_CLAIM}"
        )
    why = f"about {d.more} more rounds would settle it"
    if d.apart:
        why = "one process a side cannot tell a change from how it was born, in however many rounds: measure both together (--against)"
    elif d.more is None:
        why = f"the difference between change and tolerance is below the noise: over {MOST_ROUNDS} rounds"
    if d.flagged and confirmed:
        why += f"; flagged, and {d.fresh} fresh rounds did not confirm it (p {d.p_confirm:.2g})"
    return why


def _judge_value(unit: Unit) -> None:
    """One number against another, without statistics; or why there are not two."""
    if unit.is_open:
        return
    if unit.trouble:
        unit.cause = None if unit.state is UnitState.NO_TIME else SlowdownCause("missing")
        unit.found(UnitVerdict.REGRESSED, f"{unit.reason}: what cannot be compared is no pass")
        return
    allowed = unit.rule.tolerance * abs(unit.before) + unit.rule.absolute
    worse = 0.0 if unit.before == unit.after else unit.worse * (unit.after - unit.before)
    if math.isinf(worse):
        allowed = 0.0
    figures = f"{unit.before:.6g} -> {unit.after:.6g} {unit.unit}"
    if worse > allowed:
        unit.found(UnitVerdict.REGRESSED, f"{figures}; {allowed:.3g} is tolerated")
    else:
        unit.found(UnitVerdict.IMPROVED if worse < -allowed else UnitVerdict.OK, figures)


RANK = ("FAIL", "INCONCLUSIVE", "PASS")
MOST_OF_A_REASON = 300  # characters of a gate's sentence that a table holds


def _trained(before: pd.DataFrame, after: pd.DataFrame, policy: Policy) -> list[Unit]:
    """Every arm that the candidate trained, and what is found about it; none where the policy ignores the loss."""
    old, new = (
        grouped(((json.dumps(v.axes, sort_keys=True), v.arm), v) for v in verdict.judge(frame))
        for frame in (before, after)
    )
    found = [_worst_unit(verdicts, old[arm]) for arm, verdicts in new.items()]
    return [u for u in found if policy.rule_for(u.fields).rule != "ignore"]


def _worst_unit(verdicts: Sequence[ArmVerdict], before: Sequence[ArmVerdict]) -> Unit:
    """The worst of an arm's verdicts, of several runs of one set-up."""
    worst = min(verdicts, key=lambda v: RANK.index(v.verdict.outcome))
    was = min((v.verdict.outcome for v in before), key=RANK.index, default="not trained")
    outcome, ought = worst.verdict.outcome, ""
    words = {"FAIL": UnitVerdict.REGRESSED, "PASS": UnitVerdict.IMPROVED if was == "FAIL" else UnitVerdict.OK}
    if worst.expected == "FAIL":
        words = {"FAIL": UnitVerdict.OK}
        ought = "as it has to" if outcome == "FAIL" else "it has to FAIL, so this set-up cannot tell"
    parts = [f"{outcome} against {worst.against}", ought, "" if was == outcome else f"baseline: {was}"]
    if outcome != "PASS":
        parts += [text[:MOST_OF_A_REASON] for text in (*worst.verdict.reasons, *worst.verdict.notes)[:1]]
    return Unit(
        UnitKey(SUITE, "", worst.arm, LOSS, "", ""), case_label(dict(worst.axes)), "", "lower", MetricRule("numerics"),
        verdict=words.get(outcome, UnitVerdict.INCONCLUSIVE), reason="; ".join(filter(None, parts)),
    )  # fmt: skip


def _hold(unit: Unit, policy: Policy, date: datetime.date) -> None:
    """Applies the policy: whether a slower time is only reported, and whether an allowance covers it."""
    unit.told_only = policy.on_slower == "warn" and unit.is_time
    if unit.verdict is UnitVerdict.REGRESSED or unit.looks_slower or unit.in_doubt:
        unit.allowed = policy.allowance(unit.fields)
        unit.expired = unit.allowed is not None and unit.allowed.until < date


def _could_not_judge(found: Judgement, policy: Policy) -> bool:
    """Whether silence would read as approval.

    So it would where a unit looks slower, where nothing at all was decided, where no time was, or where more times stayed
    open, or more arms failed on both sides, than the policy puts up with.
    """
    open_times, times = len(found.undecided), len(found.times)
    arms = {f.key[1:3] for f in found.findings}
    failed = sum(f.state is UnitState.FAILED_TWICE for f in found.findings)
    return (
        bool(found.suspects)
        or failed > policy.undecided_share * len(arms)
        or all(f.verdict is UnitVerdict.INCONCLUSIVE for f in found.findings)
        or (bool(times) and (open_times == times or open_times > policy.undecided_share * times))
    )


def _code(found: Judgement, policy: Policy) -> Exit:
    """What is certain speaks first: numerics, then what was counted, then the machine, then the clock."""
    regressed = [f for f in found.findings if f.counts]
    if any(u.state is UnitState.WRONG or (u.rule.rule == "numerics" and not u.trouble) for u in regressed):
        return Exit.NUMERICS
    if any(u.rule.rule == "exact" or u.trouble for u in regressed):
        return Exit.REGRESSED
    if found.control.moved:
        return Exit.INVALID
    if regressed:
        return Exit.REGRESSED
    undecided = any(f.verdict is UnitVerdict.INCONCLUSIVE for f in found.findings)
    if (
        found.suspects  # a policy may put up with what is open, not with what speaks against the change
        or (undecided and policy.on_inconclusive == "fail")
        or (found.could_not_judge and policy.on_inconclusive == "share")
    ):
        return Exit.INCONCLUSIVE
    return Exit.OK
