"""Units: which rows of two sides belong together, and what is to be judged about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.gate.align import (
    confirmation,
    control_rounds,
    fill_confirmation,
    fill_rounds,
    judge_again,
    mark_invalid,
    only_ok,
    ratio_units,
    rows_by_key,
)
from harness.gate.conditions import mark_conditions
from harness.gate.exit_code import Exit, GateError, Loud
from harness.gate.failed_arms import failed_arms
from harness.gate.judged_metric import KEY, LOSS, OPERATORS, Unit, arm_names, facts_of
from harness.gate.policy import Rule
from harness.gate.sides import CONTROL_SUITE, FIRST, same_class
from harness.store.cause import REFUTED
from harness.store.measurement import METRICS
from harness.store.text import axes_of, case_label

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from harness.gate.policy import Better, Policy
    from harness.gate.sides import Mode, Side
    from harness.store.stats import Vector


@dataclass(frozen=True)
class Matched:
    """All units of two sides, the control's rounds, and what is only on the candidate's side."""

    units: tuple[Unit, ...]
    control: Vector
    notes: tuple[str, ...]


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
    failed, told = failed_arms(before, after, policy)
    notes += told
    if new := set(after["case_id"]) - set(before["case_id"]) - _control_ids(after):
        notes.append(f"{len(new)} cases are new in the candidate and have nothing to be compared with")
    units = (
        _units(before, after, policy, policy.facts, elsewhere=baseline.env_id != candidate.env_id) + failed
    )
    notes += _of_another_torch(units, baseline, candidate)
    again = confirmation(baseline, candidate)
    judge_again(again, units)
    timed = [u for u in units if u.is_sound_time]
    if mode == "machine-free":
        ok = only_ok(again[0]), only_ok(again[1])
        mark_invalid([(u, u.rows) for u in timed])
        mark_invalid([(u, (ok[0].get(u.key, []), ok[1].get(u.key, []))) for u in timed if u.is_sound_time])
        timed = [u for u in timed if u.is_sound_time]
        ratios = ratio_units(timed, ok) if same_class(baseline, candidate) else []
        units = [u for u in units if not u.is_sound_time] + ratios
        if timed and not ratios:
            notes.append(f"{len(timed)} times were not judged: ratios need one kind of device on both sides")
    else:
        notes += mark_conditions(timed, policy)
        fill_rounds(timed, FIRST, by_number=mode == "paired")
        if spoilt := fill_confirmation(again, timed, policy, by_number=mode == "paired"):
            notes.append(f"{spoilt} confirmations decide nothing, by exclude in the policy")
    return Matched(tuple(units), control_rounds(before, after, mode), tuple(notes))


def _control_ids(frame: pd.DataFrame) -> set[str]:
    return set(frame.loc[frame["suite"] == CONTROL_SUITE, "case_id"])


def _release(side: Side) -> str:
    """The version of torch without its build: "2.13.0+cpu" and "2.13.0+cu130" hold the same Python."""
    return str(side.env.get("torch")).partition("+")[0]


def _of_another_torch(units: list[Unit], baseline: Side, candidate: Side) -> list[str]:
    """Leaves the counts open that depend on the release of PyTorch, where the sides have two; says which and what to do."""
    was, now = _release(baseline), _release(candidate)
    found = [u for u in units if u.metric == OPERATORS and not u.trouble and not u.undecided]
    if was == now or not found:
        return []
    for unit in found:
        unit.undecided = f"torch {now} may take an operator apart otherwise than the baseline's {was}"
    return [
        Loud(
            f"NOT JUDGED: {OPERATORS} of {len(found)} units ({arm_names(found)}), as torch {was} became {now}; "
            f"measure the baseline {baseline.commit} anew with torch {now}: python -m harness gate --measure --machine-free "
            "(in this repository: make gate ARGS=update)"
        )
    ]


def _units(
    before: pd.DataFrame, after: pd.DataFrame, policy: Policy, facts: Mapping[str, Better], *, elsewhere: bool
) -> list[Unit]:
    mine, theirs = rows_by_key(before), rows_by_key(after)
    # What was not measured has no regime and may stand under another metric: it is looked up by case and arm.
    absent = {(k[1], k[2]): rows[0] for k, rows in theirs.items() if rows[0].status != "ok"}
    labels = {axes: case_label(axes_of(axes)) for axes in before["axes"].unique()}
    units = []
    for key, rows in mine.items():
        row = rows[0]
        if row.status != "ok":  # the baseline itself has no number: nothing can have become worse
            continue
        if row.metric == LOSS or (
            row.metric in METRICS and METRICS[row.metric].series and len(row.samples) > 1
        ):
            continue  # a curve over training steps; `loss` judges those
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
            unit.wrong = there is not None and there.status == "failed" and there.cause in REFUTED
            unit.trouble = f"{there.status}: {there.reason}" if there is not None else "not in the candidate"
            if elsewhere and there is not None and there.status == "skipped":
                # Another machine may lack a compiler or a kernel, whatever the code.
                unit.undecided = f"{unit.trouble}; the baseline's machine is another"
        units.append(unit)
    return units


def _declared(timed: Unit, facts: Mapping[str, Better]) -> list[Unit]:
    """Units for what two rows of a time state about themselves: bytes, calls, graph breaks."""
    if timed.rule.rule != "timed":
        return []
    a, b = timed.rows[0][0], timed.rows[1][0]
    pairs = {"bytes_moved": (a.bytes_moved, b.bytes_moved)}
    one = facts_of(a)
    other = one if a.resolved == b.resolved else facts_of(b)
    pairs |= {name: (one.get(name), other.get(name)) for name in facts}
    return [
        Unit(
            *(timed.suite, timed.case_id, timed.case, timed.arm, name, timed.regime, timed.part),
            unit="byte" if name == "bytes_moved" else "count",
            better=facts.get(name, "lower"),
            rule=Rule("exact"),
            before=float(before),
            after=float(after) if _is_number(after) else np.nan,
            undecided="" if _is_number(after) else "the candidate's row does not state it",
        )
        for name, (before, after) in pairs.items()
        if _is_number(before) and before >= 0
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not np.isnan(value)
