"""Doubts: why an arm's figure must not be read as a gain, and which arms have no figure at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.headline import proof, recipe
from harness.report.numerics import numerics_by_arm
from harness.report.training import is_candidate
from harness.report.verdicts import fp8_pairs
from harness.store import text
from harness.store.arm import arm_of
from harness.store.compare import rows_of

if TYPE_CHECKING:
    from harness.report.headline import Standing
    from harness.report.runs import Machine
    from harness.store.arm import Arm


@dataclass(frozen=True, slots=True)
class Unjudged:
    """An FP8 arm without a single ratio."""

    arm: str
    fields: Arm
    word: str  # failed, skipped or missing
    reason: str


def doubts(machine: Machine, standing: Standing) -> list[str]:
    """What stands against the figure of an arm: each in a few words; none where all of it was judged and passed."""
    found = []
    unclear = sum(p["verdict"] == "unclear" for p in standing.pairs)
    if unclear:
        found.append(f"can't tell in {_of(unclear, len(standing.pairs))}")
    every = fp8_pairs(machine)
    own = every[(every["suite"] == standing.suite) & (every["arm"] == standing.arm)]
    missing = int(((own["verdict"] == "missing") & (own["regime"] != "sustained")).sum())
    if missing:
        found.append(f"{text.plural(missing, 'case')} without a time")
    computed = recipe(standing.fields)
    seen, _ = proof(machine, standing.fields, computed)
    if not seen.text:
        found.append("FP8 not proved")
    elif seen.style == "bad":
        found.append(f"only {seen.text} GEMMs in FP8")
    checked = [w for w in numerics_by_arm(machine) if w.fp8 and w.judged and recipe(w.fields) == computed]
    if any(w.below(m) for w in checked for m in w.sqnr):
        found.append("SQNR below its bound")
    outcomes = Counter(v.verdict.outcome for v in machine.verdicts if v.fields == computed)
    if outcomes["FAIL"]:
        found.append("loss: FAIL")
    elif outcomes["INCONCLUSIVE"]:
        found.append("loss: can't tell")
    return found


def unjudged(machine: Machine, suite: str) -> list[Unjudged]:
    """FP8 arms of a suite that were asked for and have no ratio in any case, with the first reason of each."""
    ratios = machine.ratios
    own = ratios[(ratios["suite"] == suite) & (ratios["regime"] != "sustained")]
    known = set(own["arm"][own["speedup"].notna()])
    found: dict[str, Unjudged] = {}
    for row in rows_of(own):
        arm = arm_of(row)
        if (
            row["arm"] not in known
            and row["arm"] not in found
            and is_candidate(arm)
            and (arm.has_fp8 or arm.peer)
        ):
            word, _, reason = row["reason"].partition(": ")
            told = (word, reason) if word in ("failed", "skipped") else ("missing", row["reason"])
            found[row["arm"]] = Unjudged(row["arm"], arm, *told)
    return list(found.values())


def _of(part: int, whole: int) -> str:
    return text.plural(whole, "case") if part == whole else f"{part} of {text.plural(whole, 'case')}"
