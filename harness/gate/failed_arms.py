"""Failed arms: what the baseline could not measure. An arm that fails on both sides is undecided and counts as such."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.gate.exit_code import Loud
from harness.gate.judged_metric import Unit, arm_names
from harness.gate.sides import CONTROL_SUITE
from harness.store.arm import controls
from harness.store.text import axes_of, case_label

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from harness.gate.policy import Policy

REASON = 160  # characters of a reason that a note shows


def failed_arms(before: pd.DataFrame, after: pd.DataFrame, policy: Policy) -> tuple[list[Unit], list[str]]:
    """Finds the arms that failed in the baseline.

    Returns:
        One undecided unit for each that gave no number in the candidate either, and notes. An arm that works in the
        candidate has nothing to fall behind: a note says so.
    """
    measured = {(r.case_id, r.arm, r.metric) for r in _rows(before) if r.status == "ok"}
    candidate: dict[tuple[str, str], list[Any]] = {}
    for row in _rows(after):
        candidate.setdefault((row.case_id, row.arm), []).append(row)
    broken = before[(before["status"] == "failed") & ~controls(before) & (before["suite"] != CONTROL_SUITE)]
    units: dict[tuple[str, str], Unit] = {}
    mended: dict[tuple[str, str], str] = {}
    for row in _rows(broken):
        key = row.case_id, row.arm
        if (*key, row.metric) in measured or key in units or key in mended:
            continue
        rows = candidate.get(key, [])
        failed = [r for r in rows if r.status == "failed"]
        if not failed and any(r.status == "ok" for r in rows):
            mended[key] = row.reason
        else:
            units[key] = _undecided(row, (failed or rows or [None])[0], policy)
    return list(units.values()), _notes(list(units.values()), list(mended.values()))


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    return frame.itertuples(index=False)


def _undecided(row: Any, other: Any, policy: Policy) -> Unit:
    label = case_label(axes_of(row.axes))
    fields = {"suite": row.suite, "arm": row.arm, "metric": row.metric, "case": label}
    if other is None:
        why = f"failed in the baseline: {row.reason}; not in the candidate"
    elif other.status == "failed":
        same = other.reason == row.reason
        why = f"failed on both sides: {row.reason}" + ("" if same else f"; in the candidate: {other.reason}")
    else:
        why = f"failed in the baseline: {row.reason}; in the candidate {other.status}: {other.reason}"
    return Unit(
        *(row.suite, row.case_id, label, row.arm, row.metric, row.regime or "", row.part or ""),
        unit=row.unit,
        better=row.better,
        rule=policy.rule_for(fields),
        undecided=why,
        failed_twice=True,
    )


def _notes(units: list[Unit], mended: list[str]) -> list[str]:
    notes: list[str] = []
    if units:
        notes.append(
            Loud(
                f"NOT JUDGED: {len(units)} arms failed on both sides or are gone ({arm_names(units)}); the first "
                f"{units[0].undecided[:REASON]}"
            )
        )
    if mended:
        notes.append(
            f"{len(mended)} arms failed in the baseline and have nothing to fall behind; the first: {mended[0][:REASON]}"
        )
    return notes
