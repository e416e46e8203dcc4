"""Diagnosis: what is probably wrong with a run, found in its stored rows, each finding with its figures and a way out.

One function a symptom, all in `checks.CHECKS`. The symptoms are those that guides for FP8 training warn of and leave to the
reader: FP8 that never ran, hardware without it, a loss that diverges at once or spikes, memory that FP8 needs and bf16 did
not, layers too small to pay, scales that never move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.judge import verdict
from harness.judge.diagnosis.checks import CHECKS
from harness.judge.diagnosis.finding import Finding, Material, Record
from harness.judge.verdict.rows import setups
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from harness.judge.verdict import ArmVerdict

__all__ = ["CHECKS", "Finding", "findings", "lines"]


def findings(
    frame: pd.DataFrame,
    verdicts: Sequence[ArmVerdict] | None = None,
    ratios: pd.DataFrame | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
) -> list[Finding]:
    """Everything that the rows show to be wrong, in the order of `CHECKS`; each finding once.

    Args:
        frame: rows as read by `harness.store.read`.
        verdicts: of `harness.judge.verdict.judge` on the same rows, where they are at hand.
        ratios: of `harness.store.compare.paired_ratios`, likewise.
        rows: of `harness.store.compare.rows_of`, likewise.
    """
    records = [Record(row) for row in (rows_of(frame) if rows is None else rows)]
    verdicts = verdict.judge(frame) if verdicts is None else verdicts
    material = Material(frame, records, setups(frame), verdicts, ratios)
    return list(dict.fromkeys(finding for check in CHECKS for finding in check(material)))


def lines(found: Sequence[Finding]) -> list[str]:
    """Findings as text for a terminal."""
    out = []
    for f in found:
        out += [f"finding  {f.symptom}", *(f"         {e}" for e in f.evidence)]
        out += [f"         cause: {f.cause}", f"         change: {f.change}"]
    return out
