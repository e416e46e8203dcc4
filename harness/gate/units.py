"""Units: what is judged one by one. A unit is one metric of one arm of one case, with both sides' numbers aligned.

Timed metrics become one logarithm of a ratio a round. How rounds are paired depends on the mode:

- paired: by their number. Round r of both sides is one pair of processes that ran together.
- stored: by their order. Rounds of one run are exchangeable, so any fixed pairing is valid within the runs; what no
  pairing can cancel is the session itself, so the policy widens the tolerance by `session_spread`.
- machine-free: an arm over its own baseline within each run, then as stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import stats
from harness.compare import AGAIN
from harness.gate.codes import Exit, GateError
from harness.gate.policy import Rule
from harness.gate.sides import CONFIRMATION, CONTROL_SUITE, FIRST, same_class
from harness.measurement import METRICS
from harness.report.text import axes_of, case_label

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from harness.gate.policy import Policy
    from harness.gate.sides import Mode, Side
    from harness.stats import Vector

Key = tuple[str, ...]
Table = dict[Key, list[Any]]
OPERATORS = "operator_calls"  # the fact that depends on the version of PyTorch
RATIO = "ratio"  # regime of units that are ratios of two arms of one run
KEY = ("suite", "case_id", "arm", "metric", "regime", "part")
_EMPTY: Vector = np.empty(0)
_ROUNDS = 2**32  # more than any run has, so that unit * _ROUNDS + round names a round of a unit


@dataclass(slots=True)
class Unit:
    """One metric of one arm of one case on both sides.

    Attributes:
        first, second: log(candidate / baseline) by round of the first stage and of the confirmation, positive = worse.
        before, after: the two values, in `unit`.
        trouble: why there is nothing to compare; "" where there is.
        rows: the stored rows (baseline's, candidate's), for whoever looks for the cause.
    """

    suite: str
    case_id: str
    case: str
    arm: str
    metric: str
    regime: str
    part: str
    unit: str
    better: str
    rule: Rule
    before: float = np.nan
    after: float = np.nan
    first: Vector = field(default_factory=lambda: _EMPTY)
    second: Vector = field(default_factory=lambda: _EMPTY)
    trouble: str = ""
    failed: bool = False  # the candidate's row is a failure
    rows: tuple[Any, Any] = (None, None)
    members: tuple[str, ...] = ()  # of a group: the ids of its cases

    @property
    def cases(self) -> tuple[str, ...]:
        """Ids of the cases to measure for this unit."""
        return self.members or (self.case_id,)

    @property
    def key(self) -> Key:
        """Which rows of a store belong to this unit."""
        return (self.suite, self.case_id, self.arm, self.metric, self.regime, self.part)

    @property
    def fields(self) -> dict[str, str]:
        """What a policy's globs are matched against."""
        return {
            "suite": self.suite,
            "arm": self.arm,
            "metric": self.metric,
            "regime": self.regime,
            "part": self.part,
            "case": self.case,
        }

    @property
    def worse(self) -> float:
        """+1 where more is worse, -1 where less is."""
        return -1.0 if self.better == "higher" else 1.0


@dataclass(frozen=True)
class Matched:
    """All units of two sides, the control's rounds, and what is only on the candidate's side."""

    units: tuple[Unit, ...]
    control: Vector
    notes: tuple[str, ...]
    common_cases: int


def match(baseline: Side, candidate: Side, mode: Mode, policy: Policy) -> Matched:
    """Aligns two sides.

    Raises:
        GateError: not one case is on both sides (exit 5).
    """
    before, after = baseline.first, candidate.first
    common = set(before["case_id"]) & set(after["case_id"]) - _control_ids(before)
    if not common:
        raise GateError(
            Exit.NO_BASELINE,
            f"no case is in both {baseline.name} and {candidate.name}; measure the same sweep, axes and seed",
        )
    notes = [*baseline.notes, *candidate.notes]
    broken = (before["status"] == "failed") & ~before["arm"].str.endswith(AGAIN)
    if lost := before[broken].groupby(["case_id", "arm"]).ngroups:
        reason = str(before.loc[broken, "reason"].iloc[0])
        notes.append(
            f"{lost} arms failed in the baseline and have nothing to fall behind; the first: {reason[:160]}"
        )
    if new := set(after["case_id"]) - set(before["case_id"]):
        notes.append(f"{len(new)} cases are new in the candidate and have nothing to be compared with")
    facts = policy.facts
    if OPERATORS in facts and baseline.env.get("torch") != candidate.env.get("torch"):
        facts = tuple(name for name in facts if name != OPERATORS)
        notes.append(f"{OPERATORS} was not judged: another torch takes an operator apart differently")
    units = _units(before, after, policy, facts)
    timed = [u for u in units if u.rule.rule == "timed" and not u.trouble]
    if mode == "machine-free":
        ratios = _ratio_units(timed, _again(baseline, candidate)) if same_class(baseline, candidate) else []
        units = [u for u in units if u.rule.rule != "timed" or u.trouble] + ratios
        if timed and not ratios:
            notes.append(f"{len(timed)} times were not judged: ratios need one kind of device on both sides")
    else:
        _fill_rounds(timed, FIRST, by_number=mode == "paired")
        _fill_confirmation(_again(baseline, candidate), timed, by_number=mode == "paired")
    return Matched(tuple(units), _control(before, after, mode), tuple(notes), len(common))


def _control_ids(frame: pd.DataFrame) -> set[str]:
    return set(frame.loc[frame["suite"] == CONTROL_SUITE, "case_id"])


def _rows(frame: pd.DataFrame) -> Table:
    """The rows of each key, the controls of the A/A floor and of the gate left out."""
    keep = frame[~frame["arm"].str.endswith(AGAIN) & (frame["suite"] != CONTROL_SUITE)]
    table: Table = {}
    for row in keep.itertuples(index=False):
        table.setdefault(tuple(getattr(row, name) or "" for name in KEY), []).append(row)
    return table


def _units(
    before: pd.DataFrame, after: pd.DataFrame, policy: Policy, facts: tuple[str, ...]
) -> list[Unit]:
    mine, theirs = _rows(before), _rows(after)
    # What was not measured has no regime and may stand under another metric: it is looked up by case and arm.
    absent = {(k[1], k[2]): rows[0] for k, rows in theirs.items() if rows[0].status != "ok"}
    labels = {axes: case_label(axes_of(axes)) for axes in before["axes"].unique()}
    units = []
    for key, rows in mine.items():
        row = rows[0]
        if row.status != "ok":  # the baseline itself has no number: nothing can have become worse
            continue
        if row.metric in METRICS and METRICS[row.metric].series and len(row.samples) > 1:
            continue  # a curve over training steps; the loss verdict judges those
        unit = Unit(
            *(
                row.suite,
                row.case_id,
                labels[row.axes],
                row.arm,
                row.metric,
                row.regime or "",
                row.part or "",
            ),
            unit=row.unit,
            better=row.better,
            rule=policy.rule_for({**dict(zip(KEY, key, strict=True)), "case": labels[row.axes]}),
            before=row.value,
        )
        if unit.rule.rule == "ignore":
            continue
        found = theirs.get(key, [])
        if found and found[0].status == "ok":
            unit.after = found[0].value
            unit.rows = (rows, found)
            units += _declared(unit, facts)
        else:
            there = found[0] if found else absent.get((row.case_id, row.arm))
            unit.failed = there is not None and there.status == "failed"
            unit.trouble = f"{there.status}: {there.reason}" if there is not None else "not in the candidate"
        units.append(unit)
    return units


def _declared(timed: Unit, facts: tuple[str, ...]) -> list[Unit]:
    """Units for what two rows of a time state about themselves, where they differ: bytes, calls, graph breaks."""
    if timed.rule.rule != "timed":
        return []
    a, b = timed.rows[0][0], timed.rows[1][0]
    pairs = {"bytes_moved": (a.bytes_moved, b.bytes_moved)}
    if a.resolved != b.resolved:
        one, other = facts_of(a), facts_of(b)
        pairs |= {name: (one.get(name), other.get(name)) for name in facts}
    return [
        Unit(
            *(timed.suite, timed.case_id, timed.case, timed.arm, name, timed.regime, timed.part),
            unit="byte" if name == "bytes_moved" else "count",
            better="lower",
            rule=Rule("exact"),
            before=float(before),
            after=float(after),
        )
        for name, (before, after) in pairs.items()
        if isinstance(before, int | float)
        and isinstance(after, int | float)
        and before != after
        and before >= 0
    ]


def _flat(rows_of: list[list[Any]], by_number: bool) -> tuple[NDArray[np.int64], Vector]:
    """Round names (unit * _ROUNDS + round) and log medians of many units, all at once."""
    values, groups = [], []
    for index, rows in enumerate(rows_of):
        for place, row in enumerate(rows):
            samples = np.asarray(row.samples, dtype=np.float64)
            rounds = np.asarray(row.rounds, dtype=np.int64)
            if rounds.size != samples.size:
                rounds = np.zeros(samples.size, dtype=np.int64)
            values.append(samples)
            groups.append(rounds + index * _ROUNDS + place * 2**24)
    names, medians = stats.round_medians(np.concatenate(values), np.concatenate(groups))
    if not by_number:  # the n-th round of each unit, whatever its number
        unit = names // _ROUNDS
        first = np.flatnonzero(np.concatenate(([True], unit[1:] != unit[:-1])))
        rank = np.arange(names.size) - np.repeat(first, np.diff(np.append(first, names.size)))
        names = unit * _ROUNDS + rank
    return names, np.log(medians)


def _fill_rounds(units: list[Unit], stage: int, *, by_number: bool) -> None:
    """Puts the log ratios of one stage into the units."""
    sound = []
    for unit in units:
        if any(min(row.samples) <= 0 for rows in unit.rows for row in rows):
            unit.trouble = "a sample is not above 0, which no time is"
        else:
            sound.append(unit)
    if not sound:
        return
    a, log_a = _flat([u.rows[0] for u in sound], by_number)
    b, log_b = _flat([u.rows[1] for u in sound], by_number)
    shared, in_a, in_b = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    ratios = log_b[in_b] - log_a[in_a]
    ends = np.searchsorted(shared // _ROUNDS, np.arange(len(sound) + 1))
    for index, unit in enumerate(sound):
        logs = unit.worse * ratios[ends[index] : ends[index + 1]]
        if stage == FIRST:
            unit.first = logs
        else:
            unit.second = logs


def _again(baseline: Side, candidate: Side) -> tuple[Table, Table]:
    """The rows of the confirmation. A stored baseline has none of its own: fresh data of the candidate meet its first."""
    if CONFIRMATION not in candidate.stages:
        return {}, {}
    before = baseline.stages.get(CONFIRMATION, baseline.first)
    return tuple(  # type: ignore[return-value]
        {key: ok for key, rows in _rows(frame).items() if (ok := [r for r in rows if r.status == "ok"])}
        for frame in (before, candidate.stages[CONFIRMATION])
    )


def _fill_confirmation(tables: tuple[Table, Table], units: list[Unit], *, by_number: bool) -> None:
    again = [u for u in units if not u.trouble and u.key in tables[0] and u.key in tables[1]]
    first = [u.rows for u in again]
    for unit in again:
        unit.rows = (tables[0][unit.key], tables[1][unit.key])
    _fill_rounds(again, CONFIRMATION, by_number=by_number)
    for unit, rows in zip(again, first, strict=True):
        unit.rows = rows


def _ratio_units(timed: list[Unit], tables: tuple[Table, Table]) -> list[Unit]:
    """Each arm over the baseline that its suite declares, within each run; then one run against the other."""
    by_key = {u.key: u for u in timed}
    out = []
    for unit in timed:
        reference = by_key.get(_with_arm(unit.key, unit.rows[0][0].baseline or ""))
        if reference is None:
            continue
        logs = [_within(unit.rows[side], reference.rows[side]) for side in (0, 1)]
        again = [_within(t.get(unit.key, []), t.get(reference.key, [])) for t in tables]
        out.append(
            Unit(
                *(unit.suite, unit.case_id, unit.case, unit.arm, unit.metric, RATIO, unit.part),
                unit=f"x {reference.arm}",
                better=unit.better,
                rule=unit.rule,
                before=float(np.exp(logs[0].mean())) if logs[0].size else np.nan,
                after=float(np.exp(logs[1].mean())) if logs[1].size else np.nan,
                first=unit.worse * _difference(*logs),
                second=unit.worse * _difference(*again),
                rows=unit.rows,
            )
        )
    return out


def _with_arm(key: Key, arm: str) -> Key:
    return (*key[:2], arm, *key[3:])


def _difference(before: Vector, after: Vector) -> Vector:
    rounds = min(before.size, after.size)
    return after[:rounds] - before[:rounds]


def _within(arm: list[Any], reference: list[Any]) -> Vector:
    """log(arm / reference) by round, over all runs of one side."""
    logs = [
        stats.paired_log_ratios(r.samples, r.rounds, a.samples, a.rounds)
        for a, r in zip(arm, reference, strict=False)
        if set(a.rounds) & set(r.rounds)
    ]
    return np.concatenate(logs) if logs else _EMPTY


def _control(before: pd.DataFrame, after: pd.DataFrame, mode: Mode) -> Vector:
    """Log ratios of the control case by round; empty where there is none, or where no time is judged."""
    if mode == "machine-free":
        return _EMPTY
    a, b = (_only_ok(frame[frame["suite"] == CONTROL_SUITE]) for frame in (before, after))
    if not a or not b:  # a stored run of a plain sweep: the product that PyTorch alone computes stands in
        a, b = (
            _only_ok(
                frame[(frame["suite"] == "gemm") & (frame["arm"] == "bf16") & (frame["metric"] == "time_ms")]
            )
            for frame in (before, after)
        )
        shared = sorted({r.case_id for r in a} & {r.case_id for r in b})[:1]
        a, b = ([r for r in rows if r.case_id in shared] for rows in (a, b))
    if not a or not b:
        return _EMPTY
    names_a, log_a = _flat([a], mode == "paired")
    names_b, log_b = _flat([b], mode == "paired")
    _, in_a, in_b = np.intersect1d(names_a, names_b, assume_unique=True, return_indices=True)
    return log_b[in_b] - log_a[in_a]


def _only_ok(frame: pd.DataFrame) -> list[Any]:
    return [row for row in frame.itertuples(index=False) if row.status == "ok"]


def facts_of(row: Any) -> dict[str, Any]:
    """What a stored row says really ran."""
    try:
        resolved = json.loads(row.resolved or "{}")
    except (TypeError, ValueError):
        return {}
    return resolved if isinstance(resolved, dict) else {}
