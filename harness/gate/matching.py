"""Matching: which rows of two sides belong together, and one logarithm of a ratio a round of each time.

How rounds are paired depends on the mode:

- paired: by their number. Round r of both sides is one pair of processes that ran together.
- stored: by their order. Rounds of one run are exchangeable, so any fixed pairing is valid within the runs; what no
  pairing can cancel is the session itself, so the policy widens the tolerance by `session_spread`.
- machine-free: an arm over its own baseline within each run, then as stored.

Nothing is dropped in silence: what cannot be compared is a unit with a `UnitState` and a reason.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median  # of the few samples of a round, a tenth of the time of numpy's
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.options import Exit, GateError, Loud
from harness.gate.policy import MetricRule
from harness.gate.sides import CONFIRMATION, CONTROL_SUITE, same_class
from harness.gate.unit import EMPTY, RATIO, RowPair, Unit, UnitKey, UnitState
from harness.store.case import controls
from harness.store.compare import METHODS, method_of
from harness.store.errors import REFUTED, RETRYABLE
from harness.store.measurement import METRICS
from harness.store.outside import parse
from harness.store.rows import grouped
from harness.store.text import axes_of, case_label, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd

    from harness.gate.policy import Policy
    from harness.gate.sides import Mode, Side
    from harness.store.stats import Vector

RowsByKey = dict[UnitKey, list[Any]]  # the stored rows of each key, one a run
LOSS = "loss"  # the metric by which training is judged: not its value, but what the loss verdict says
OPERATORS = "operator_calls"  # the fact that depends on the version of PyTorch
COUNTED = 1e9  # ms: no time is eleven days long, so it is a count of instructions, and such may be equal
# In a stored run of a plain sweep the product that PyTorch alone computes stands in for the control
STAND_IN = "status == 'ok' and suite == 'gemm' and arm == 'bf16_eager' and metric == 'time_ms'"
REASON = 160  # characters of a reason that a note shows
CONDITIONS = {
    "contended": "beside another process on the device",
    "throttled": "while the device was throttled",
}


@dataclass(frozen=True)
class Matched:
    """All units of two sides, the control's rounds, and remarks on them."""

    units: list[Unit]
    control: Vector  # empty where there is none or no time is judged, NaN where it failed or is no time
    notes: list[str]


def match(baseline: Side, candidate: Side, mode: Mode, policy: Policy) -> Matched:
    """Aligns two sides.

    Raises:
        GateError: not one case is on both sides (exit 5).
    """
    sides = baseline, candidate
    mine, theirs = (by_key(side.first) for side in sides)
    old, new = ({key.case_id for key in table} for table in (mine, theirs))
    if not old & new:
        raise GateError(
            Exit.NO_BASELINE,
            f"no case is in both {baseline.name} and {candidate.name}; measure the same sweep, axes and seed",
        )
    notes = [*baseline.notes, *candidate.notes]
    releases = [str(side.env.get("torch")).partition("+")[0] for side in sides]
    units = _units(mine, theirs, policy, notes, releases, elsewhere=baseline.env_id != candidate.env_id)
    if new - old:
        notes.append(f"{len(new - old)} cases are new in the candidate and have nothing to be compared with")
    left = [unit for unit in units if unit.key.metric == OPERATORS and unit.is_open]
    if left and releases[0] != releases[1]:
        notes.append(
            Loud(
                f"NOT JUDGED: {OPERATORS} of {len(left)} units ({_arms(left)}), {left[0].reason}; measure the baseline "
                f"{baseline.commit} anew: python -m harness gate --measure --machine-free (in this repository: make gate "
                "ARGS=update)"
            )
        )
    if CONFIRMATION in candidate.stages:
        # A stored baseline has none of its own: fresh data of the candidate meet its first.
        again = [by_key(side.stages.get(CONFIRMATION, side.first)) for side in sides]
        _judge_again(units, again[0], again[1])
    timed = [unit for unit in units if unit.is_sound_time]
    if mode == "machine-free":
        for unit in timed:
            _check_times(unit, unit.rows, unit.again)
        timed = [unit for unit in timed if unit.is_sound_time]
        ratios = _ratios(timed) if same_class(baseline, candidate) else []
        units = [unit for unit in units if not unit.is_sound_time] + ratios
        if timed and not ratios:
            notes.append(f"{len(timed)} times were not judged: ratios need one kind of device on both sides")
    else:
        _fill(timed, policy, notes, paired=mode == "paired")
        for unit in timed:
            if candidate.alone == "clocks" and unit.is_sound_time:
                unit.set_aside(UnitState.EXCLUDED, "each side was timed by a clock of its own")
    return Matched(units, _control(baseline, candidate, mode), notes)


def by_key(frame: pd.DataFrame) -> RowsByKey:
    """The rows of each key, the controls of the A/A floor and of the gate left out."""
    keep = frame[~controls(frame) & (frame["suite"] != CONTROL_SUITE)]
    rows = keep.itertuples(index=False)
    return dict(
        grouped((UnitKey(*(getattr(row, name) or "" for name in UnitKey._fields)), row) for row in rows)
    )


def _by_arm(table: RowsByKey) -> defaultdict[tuple[str, str], list[Any]]:
    """The rows of each arm: what was not measured stands under another regime or metric."""
    return grouped(((key.case_id, key.arm), row) for key, rows in table.items() for row in rows)


def _units(
    mine: RowsByKey,
    theirs: RowsByKey,
    policy: Policy,
    notes: list[str],
    releases: list[str],
    *,
    elsewhere: bool,
) -> list[Unit]:
    arms = _by_arm(theirs)
    measured = {
        (row.case_id, row.arm, row.metric) for rows in mine.values() for row in rows if row.status == "ok"
    }
    labels = {row.axes: case_label(axes_of(row.axes)) for rows in mine.values() for row in rows}
    units: list[Unit] = []
    broken: dict[tuple[str, str], Unit | None] = {}
    mended: list[str] = []
    facts: dict[str, Unit] = {}
    for key, rows in mine.items():
        row, arm = rows[0], (key.case_id, key.arm)
        fields = {**key._asdict(), "case": labels[row.axes]}
        unit = Unit(key, labels[row.axes], row.unit, row.better, policy.rule_for(fields), before=row.value)
        if row.status == "failed" and (*arm, row.metric) not in measured and arm not in broken:
            others = arms[arm]
            failed = [other for other in others if other.status == "failed"]
            made = not failed and any(other.status == "ok" for other in others)
            if made and row.cause in RETRYABLE:
                unit.set_aside(
                    UnitState.OPEN,
                    f"failed in the baseline: {row.reason}, which need not be its code's doing",
                )
                broken[arm] = unit
            elif made:
                mended.append(row.reason)
                broken[arm] = None
            else:
                unit.set_aside(UnitState.FAILED_TWICE, _failed_twice(row, (failed or others or [None])[0]))
                broken[arm] = unit
        found = theirs.get(key, [])
        is_there = bool(found) and found[0].status == "ok"
        if (
            row.status != "ok"
            or unit.rule.rule == "ignore"
            or (_is_curve(row) and (is_there or key.metric != LOSS))
        ):
            continue  # no number that can have become worse; a training run can be lost
        units.append(unit)
        if is_there:
            unit.after, unit.rows = found[0].value, (rows, found)
            for each in _declared(unit, policy, releases):  # two times of an arm may state the same
                facts.setdefault(f"{each.key} {each.before} {each.after}", each)
            continue
        there = found[0] if found else _absent(arms[arm])
        unit.set_aside(*_lost(there))
        if elsewhere and there is not None and there.status == "skipped":
            # Another machine may lack a compiler or a kernel, whatever the code.
            unit.set_aside(UnitState.OPEN, f"{unit.reason}; the baseline's machine is another")
    units += facts.values()
    if unjudged := [unit for unit in broken.values() if unit]:
        notes.append(
            Loud(
                f"NOT JUDGED: {len(unjudged)} arms failed on both sides, are gone, or were cut off in the baseline ({_arms(unjudged)}); "
                f"the first {unjudged[0].reason[:REASON]}"
            )
        )
    if mended:
        notes.append(
            f"{len(mended)} arms failed in the baseline and have nothing to fall behind; the first: {mended[0][:REASON]}"
        )
    return units + unjudged


def _is_curve(row: Any) -> bool:
    """Whether it is a curve over training steps, which the loss verdict judges."""
    return row.metric == LOSS or (
        len(row.samples) > 1 and row.metric in METRICS and METRICS[row.metric].series
    )


def _absent(rows: Sequence[Any]) -> Any:
    """The row of an arm that says why it has no number; None where all have one.

    A failure goes before a metric that was only skipped, and the last failure before others: a worker writes the rows of
    a check's figures before that of the check itself.
    """
    lost = [row for row in rows if row.status != "ok"]
    failed = [row for row in lost if row.status == "failed"]
    return (failed or lost or [None])[-1]


def _lost(row: Any, when: str = "") -> tuple[UnitState, str]:
    """How a row without a number, or none at all, is called."""
    if row is None:
        return UnitState.LOST, "not in the candidate"
    wrong = row.status == "failed" and row.cause in REFUTED
    return UnitState.WRONG if wrong else UnitState.LOST, f"{row.status}{when}: {row.reason}"


def _failed_twice(row: Any, other: Any) -> str:
    there = "not in the candidate" if other is None else f"in the candidate {other.status}: {other.reason}"
    return f"failed in the baseline: {row.reason}; {there}"


def _arms(units: Sequence[Unit]) -> str:
    return some(list(dict.fromkeys(f"{unit.key.suite}/{unit.key.arm}" for unit in units)), 6)


def _declared(timed: Unit, policy: Policy, releases: list[str]) -> Iterator[Unit]:
    """Units for what two rows of a time state about themselves: bytes, calls, graph breaks."""
    if (
        timed.rule.rule != "timed" or timed.key.metric == "compile_s"
    ):  # it was stored before the arm was checked
        return
    stated = [{**parse(rows[0].resolved), "bytes_moved": rows[0].bytes_moved} for rows in timed.rows]
    for name, better in {"bytes_moved": "lower", **policy.facts}.items():
        before, after = (number(facts.get(name)) for facts in stated)
        if not before >= 0:
            continue
        unit = Unit(
            timed.key._replace(metric=name), timed.case, "byte" if name == "bytes_moved" else "count", better, MetricRule("exact"),
            before, after,
        )  # fmt: skip
        if math.isnan(after):
            unit.set_aside(UnitState.OPEN, "the candidate's row does not state it")
        elif name == OPERATORS and releases[0] != releases[1]:
            unit.set_aside(
                UnitState.OPEN, f"torch {releases[1]} may take an operator apart otherwise than {releases[0]}"
            )
        yield unit


def number(value: Any) -> float:
    """What a row states as a figure; NaN where it does not."""
    return float(value) if isinstance(value, int | float) else math.nan


def _judge_again(units: Sequence[Unit], before: RowsByKey, after: RowsByKey) -> None:
    """What the confirmation shows: an arm that no longer runs is lost, and of two numbers that are no times the worse stands."""
    arms = _by_arm(after)
    for unit in units:
        if unit.trouble or unit.is_open:
            continue
        key = unit.key
        was, now = ([r for r in table.get(key, []) if r.status == "ok"] for table in (before, after))
        row = (after.get(key) or [_absent(arms[key.case_id, key.arm])])[0]
        if unit.rows[1] and row is not None and not now:
            unit.set_aside(*_lost(row, " in the confirmation"))
        elif unit.rule.rule == "timed":
            unit.again = (was, now)
        elif now:
            worst = max if unit.better == "lower" else min
            unit.after = worst([unit.after, *(r.value for r in now)])
            unit.before = worst([unit.before, *(r.value for r in was)])


def _fill(timed: Sequence[Unit], policy: Policy, notes: list[str], *, paired: bool) -> None:
    """Puts log ratios into the units, as far as the conditions of their measurement let them decide."""
    counts: Counter[str] = Counter()
    for unit in timed:
        for name, words in CONDITIONS.items():
            counts[f"times were measured {words}"] += any(_struck(unit.rows, name))
        again = unit.again if all(unit.again) else EMPTY
        if unconfirmed := _excluded(again, policy):
            again = EMPTY
        _check_times(unit, unit.rows, again)
        if unit.is_sound_time:
            counts["confirmations decide nothing, by exclude in the policy"] += bool(unconfirmed)
            unit.first = unit.worse * log_ratios(*unit.rows, by_number=paired)
            unit.second = unit.worse * log_ratios(*again, by_number=paired)
            unit.tick = _tick([*unit.rows, *again])
            if excluded := _excluded(unit.rows, policy):
                unit.set_aside(UnitState.EXCLUDED, excluded)
    notes += [f"{count} {what}" for what, count in counts.items() if count]


def _excluded(sides: RowPair, policy: Policy) -> str:
    """Why the times of these rows decide nothing, by the policy or by another method; "" where they may.

    Throttling excludes where it struck one side alone: products limited by power are throttled on both sides of every
    round, and are compared.
    """
    if len(methods := {method_of(parse(row.timing)): None for rows in sides for row in rows}) > 1:
        return f"{METHODS}: {' and '.join(methods)}"
    for name, words in CONDITIONS.items():
        struck = _struck(sides, name)
        if name in policy.exclude and any(struck) and (name != "throttled" or not all(struck)):
            pairs = zip(("baseline", "candidate"), struck, strict=True)
            which = " and the ".join(side for side, hit in pairs if hit)
            alone = " and the other side was not" if name == "throttled" else ""
            return f"the {which} was measured {words}{alone}; measure again, or see exclude in the policy"
    return ""


def _struck(sides: RowPair, name: str) -> list[bool]:
    return [any(parse(row.timing).get(name) for row in rows) for rows in sides]


def _check_times(unit: Unit, *stages: RowPair) -> None:
    """Sets a unit aside that has a sample which is no time: it is open where it is the baseline's, else in trouble."""
    for stage in stages:
        before, after = (_invalid_sample(rows, unit.unit) for rows in stage)
        if before:
            also = f"; the candidate's {after} too" if after else ""
            unit.set_aside(
                UnitState.OPEN, f"the baseline's {before}, which is no time{also}: measure it again"
            )
        elif after:
            unit.set_aside(UnitState.NO_TIME, f"the candidate's {after}, which is no time")
        if before or after:
            return


def _invalid_sample(rows: Sequence[Any], unit: str) -> str:
    """The first sample that is not above 0 or not finite, with its round; "" where all are times."""
    for row in rows:
        samples = np.asarray(row.samples)
        for place in np.flatnonzero((samples <= 0) | np.isinf(samples)):
            where = f" of round {row.rounds[place]}" if len(row.rounds) else ""
            return f"sample{where} is {samples[place]:g} {unit}"
    return ""


def _tick(sides: Sequence[Sequence[Any]]) -> float:
    """By how much the step of the clock may move a ratio of times, as a logarithm.

    The step is the least distance of two samples, and the whole time where all are equal: of a clock that resolves them,
    two hundred samples lie far closer together than they scatter.
    """
    samples = np.sort(np.concatenate([row.samples for side in sides for row in side]))
    samples = samples[np.isfinite(samples)]
    if samples.size and samples[0] > COUNTED:
        return 0.0
    steps = np.diff(samples, prepend=0.0)
    return math.log1p(float(steps[steps > 1e-9 * samples].min() / np.median(samples)))


def log_ratios(
    before: Sequence[Any], after: Sequence[Any], *, by_number: bool, of: Callable[[Vector], Any] = median
) -> Vector:
    """log(median after / median before) of each round, or of another statistic: of rounds of one number, or of the n-th of each side."""
    a, b = ({round_: math.log(of(x)) for round_, x in rounds_of(rows).items()} for rows in (before, after))
    if by_number:
        return np.array([b[place] - a[place] for place in a if place in b])
    return np.array([y - x for x, y in zip(a.values(), b.values(), strict=False)])


def rounds_of(rows: Sequence[Any]) -> dict[tuple[int, int], Vector]:
    """Samples by run and round, each round's in the order in which they were taken; samples without rounds are one."""
    found: dict[tuple[int, int], Vector] = {}
    for run, row in enumerate(rows):
        samples = np.asarray(row.samples, dtype=np.float64)
        rounds = np.asarray(row.rounds) if len(row.rounds) else np.zeros(len(samples), dtype=int)
        found |= {(run, int(number)): samples[rounds == number] for number in np.unique(rounds)}
    return found


def _ratios(timed: Sequence[Unit]) -> list[Unit]:
    """Each arm over the baseline that its suite declares, within each run; then one run against the other."""
    by_key = {unit.key: unit for unit in timed}
    found = []
    for unit in timed:
        reference = by_key.get(unit.key._replace(arm=unit.rows[0][0].baseline or ""))
        if reference is None:
            continue

        def within(arm: RowPair, base: RowPair) -> list[Vector]:
            return [log_ratios(b, a, by_number=True) for a, b in zip(arm, base, strict=True)]

        first, again = within(unit.rows, reference.rows), within(unit.again, reference.again)
        before, after = (math.exp(logs.mean()) if logs.size else math.nan for logs in first)
        found.append(
            Unit(
                unit.key._replace(regime=RATIO), unit.case, f"x {reference.key.arm}", unit.better, unit.rule, before, after,
                first=unit.worse * _difference(*first), second=unit.worse * _difference(*again), rows=unit.rows,
                tick=sum(_tick([*each.rows, *each.again]) for each in (unit, reference)),
            )
        )  # fmt: skip
    return found


def _difference(before: Vector, after: Vector) -> Vector:
    rounds = min(before.size, after.size)
    return after[:rounds] - before[:rounds]


def _control(baseline: Side, candidate: Side, mode: Mode) -> Vector:
    """Log ratios of the control case by round."""
    if mode == "machine-free":
        return np.empty(0)
    firsts = [side.first for side in (baseline, candidate)]
    control = [f[f["suite"] == CONTROL_SUITE] for f in firsts]
    if any((f["status"] == "failed").any() for f in control):
        return np.full(1, np.nan)
    sides = [f[f["status"] == "ok"] for f in control]
    if any(side.empty for side in sides):
        sides = [f.query(STAND_IN) for f in firsts]
        shared = sorted(set(sides[0]["case_id"]) & set(sides[1]["case_id"]))[:1]
        sides = [side[side["case_id"].isin(shared)] for side in sides]
    before, after = (list(side.itertuples(index=False)) for side in sides)
    if _invalid_sample([*before, *after], ""):
        return np.full(1, np.nan)
    return log_ratios(before, after, by_number=mode == "paired")
