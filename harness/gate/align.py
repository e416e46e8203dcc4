"""Align: from stored samples to one logarithm of a ratio a round. How rounds are paired depends on the mode:

- paired: by their number. Round r of both sides is one pair of processes that ran together.
- stored: by their order. Rounds of one run are exchangeable, so any fixed pairing is valid within the runs; what no
  pairing can cancel is the session itself, so the policy widens the tolerance by `session_spread`.
- machine-free: an arm over its own baseline within each run, then as stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.conditions import excluded_by
from harness.gate.judged_metric import EMPTY, KEY, RATIO, Key, Table, Unit
from harness.gate.sides import CONFIRMATION, CONTROL_SUITE, FIRST
from harness.store import stats
from harness.store.arm import controls
from harness.store.cause import REFUTED

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd
    from numpy.typing import NDArray

    from harness.gate.policy import Policy
    from harness.gate.sides import Mode, Side
    from harness.store.stats import Vector

_ROUNDS = 2**32  # more than any run has, so that unit * _ROUNDS + round names a round of a unit


def rows_by_key(frame: pd.DataFrame) -> Table:
    """The rows of each key, the controls of the A/A floor and of the gate left out."""
    keep = frame[~controls(frame) & (frame["suite"] != CONTROL_SUITE)]
    table: Table = {}
    for row in keep.itertuples(index=False):
        table.setdefault(tuple(getattr(row, name) or "" for name in KEY), []).append(row)
    return table


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
    names, medians = stats.group_medians(np.concatenate(values), np.concatenate(groups))
    if not by_number:  # the n-th round of each unit, whatever its number
        unit = names // _ROUNDS
        first = np.flatnonzero(np.concatenate(([True], unit[1:] != unit[:-1])))
        rank = np.arange(names.size) - np.repeat(first, np.diff(np.append(first, names.size)))
        names = unit * _ROUNDS + rank
    return names, np.log(medians)


def fill_rounds(units: list[Unit], stage: int, *, by_number: bool) -> None:
    """Puts the log ratios of one stage into the units."""
    mark_invalid([(unit, unit.rows) for unit in units])
    sound = [unit for unit in units if unit.is_sound_time]
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


def mark_invalid(rows_of: Iterable[tuple[Unit, tuple[list[Any], list[Any]]]]) -> None:
    """Marks units that have a sample which is no time: undecided where it is the baseline's, else in trouble."""
    for unit, sides in rows_of:
        before, after = (_invalid_sample(rows, unit.unit) for rows in sides)
        if before:
            also = f"; the candidate's {after} too" if after else ""
            unit.undecided = f"the baseline's {before}, which is no time{also}: measure it again"
        elif after:
            unit.trouble, unit.invalid = f"the candidate's {after}, which is no time", True


def _invalid_sample(rows: list[Any], unit: str) -> str:
    """The first sample that is not above 0 or not finite, with its round; "" where all are times."""
    for row in rows:
        if _are_times(row):
            continue
        place = next(i for i, sample in enumerate(row.samples) if not 0 < sample < np.inf)
        where = f" of round {row.rounds[place]}" if len(row.rounds) == len(row.samples) else ""
        return f"sample{where} is {row.samples[place]:g} {unit}"
    return ""


def _are_times(row: Any) -> bool:
    return bool(min(row.samples) > 0 and max(row.samples) < np.inf)


def confirmation(baseline: Side, candidate: Side) -> tuple[Table, Table]:
    """The rows of the confirmation. A stored baseline has none of its own: fresh data of the candidate meet its first."""
    if CONFIRMATION not in candidate.stages:
        return {}, {}
    before = baseline.stages.get(CONFIRMATION, baseline.first)
    return rows_by_key(before), rows_by_key(candidate.stages[CONFIRMATION])


def only_ok(table: Table) -> Table:
    """The rows that hold a number."""
    return {key: ok for key, rows in table.items() if (ok := [r for r in rows if r.status == "ok"])}


def fill_confirmation(
    tables: tuple[Table, Table], units: list[Unit], policy: Policy, *, by_number: bool
) -> int:
    """Puts the log ratios of the confirmation into the units that were measured again.

    Returns:
        How many of them stay without, as the policy excludes the conditions of their confirmation.
    """
    before, after = map(only_ok, tables)
    again = [u for u in units if u.is_sound_time and u.key in before and u.key in after]
    rows = [(before[u.key], after[u.key]) for u in again]
    sound = [not excluded_by(pair, policy) for pair in rows]
    left = [(u, pair, u.rows) for u, pair, ok in zip(again, rows, sound, strict=True) if ok]
    for unit, pair, _ in left:
        unit.rows = pair
    fill_rounds([u for u, _, _ in left], CONFIRMATION, by_number=by_number)
    for unit, _, first in left:
        unit.rows = first
    return sound.count(False)


def judge_again(tables: tuple[Table, Table], units: list[Unit]) -> None:
    """What the confirmation shows beside times: an arm that no longer runs is lost, and of two numbers the worse stands."""
    lost = {(k[1], k[2]): rows[0] for k, rows in tables[1].items() if rows[0].status != "ok"}
    before, after = map(only_ok, tables)
    for unit in units:
        row = (tables[1].get(unit.key) or [lost.get((unit.case_id, unit.arm))])[0]
        if unit.trouble or unit.undecided:
            continue
        if row is not None and unit.rows[1] is not None and unit.key not in after:
            unit.trouble = f"{row.status} in the confirmation: {row.reason}"
            unit.wrong = row.status == "failed" and row.cause in REFUTED
        elif unit.rule.rule != "timed" and unit.key in after:
            worst = max if unit.better == "lower" else min
            unit.after = worst([unit.after, *(r.value for r in after[unit.key])])
            unit.before = worst([unit.before, *(r.value for r in before.get(unit.key, []))])


def ratio_units(timed: list[Unit], tables: tuple[Table, Table]) -> list[Unit]:
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
    return np.concatenate(logs) if logs else EMPTY


def control_rounds(before: pd.DataFrame, after: pd.DataFrame, mode: Mode) -> Vector:
    """Log ratios of the control case by round; empty where there is none or no time is judged, NaN where it is no time."""
    if mode == "machine-free":
        return EMPTY
    a, b = (_only_ok(frame[frame["suite"] == CONTROL_SUITE]) for frame in (before, after))
    if not a or not b:  # a stored run of a plain sweep: the product that PyTorch alone computes stands in
        a, b = (
            _only_ok(
                frame[
                    (frame["suite"] == "gemm")
                    & (frame["arm"] == "bf16_eager")
                    & (frame["metric"] == "time_ms")
                ]
            )
            for frame in (before, after)
        )
        shared = sorted({r.case_id for r in a} & {r.case_id for r in b})[:1]
        a, b = ([r for r in rows if r.case_id in shared] for rows in (a, b))
    if not a or not b:
        return EMPTY
    if not all(map(_are_times, [*a, *b])):
        return np.full(1, np.nan)
    names_a, log_a = _flat([a], mode == "paired")
    names_b, log_b = _flat([b], mode == "paired")
    _, in_a, in_b = np.intersect1d(names_a, names_b, assume_unique=True, return_indices=True)
    return log_b[in_b] - log_a[in_a]


def _only_ok(frame: pd.DataFrame) -> list[Any]:
    return [row for row in frame.itertuples(index=False) if row.status == "ok"]
