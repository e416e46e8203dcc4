"""Arms of training steps that converted what was advised: is any of them slower than bf16 after all?

The bar is `FLOOR` of the bf16 arm that was run the same way, on every model: who follows the advice may win
little, but must not lose. A pure function of stored rows of `sweep=train axes.convert=advised`; no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.store.case import WITHOUT_FP8, arm_of
from harness.store.compare import DISTURBED, pairs_of
from harness.store.outside import parse
from harness.store.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

FLOOR = 0.98

AdviceOutcome = Literal["holds", "below", "unclear", "missing"]


@dataclass(frozen=True, slots=True)
class AdvisedArm:
    """One arm of a training step with `convert: advised`.

    Attributes:
        run_id, case_id, arm, baseline: which, and the bf16 arm that it is held against.
        model: as the case names it.
        axes: of the case.
        speedup, low, high: bf16 time over its time, with the 95 % interval over rounds; NaN where there is none.
        predicted: of the step; NaN where nothing was converted.
        converted, layers: Linear layers in FP8, and in all; 0 and 0 where it did not run.
        outcome: "holds": the whole interval is at `FLOOR` or above; "below": the whole interval is below it, and further
            from 1 than two copies of the baseline seem apart; "unclear": neither; "missing": no ratio.
        reason: why it is missing.
    """

    run_id: str
    case_id: str
    arm: str
    baseline: str
    model: str
    axes: Mapping[str, Any]
    speedup: float
    low: float
    high: float
    predicted: float
    converted: int
    layers: int
    outcome: AdviceOutcome
    reason: str = ""

    @property
    def name(self) -> str:
        """Model and arm."""
        return f"{self.model}, {self.arm}"


def advised_arms(frame: pd.DataFrame, pairs: Sequence[Mapping[str, Any]] | None = None) -> list[AdvisedArm]:
    """Every arm of a recipe in the cases with `convert: advised`, in the order of the rows.

    Args:
        frame: rows as read by `harness.store.read`.
        pairs: of `harness.store.compare.pairs_of` on them, where they are at hand.
    """
    own = frame[(frame["suite"] == "train") & (frame["metric"] == "time_ms")]
    own = own[own["axes"].str.contains('"convert":"advised"', regex=False, na=False)]
    if own.empty:
        return []
    keys = ["run_id", "case_id", "arm"]
    times = rows_of(own)
    pairs = pairs_of(times) if pairs is None else pairs
    by_key = {tuple(p[k] for k in keys): p for p in pairs if p["suite"] == "train"}
    found = {}
    for row in times:
        key, arm = tuple(row[k] for k in keys), arm_of(row)
        if arm.recipe not in WITHOUT_FP8 and not arm.control:
            found[key] = _arm(row, by_key.get(key, {}))
    return list(found.values())


def verdict(arms: Sequence[AdvisedArm]) -> str:
    """Whether any advised arm is slower than bf16 allows, in one sentence that names those."""
    count = Counter(a.outcome for a in arms)
    measured = len(arms) - count["missing"]
    below = [a.name for a in arms if a.outcome == "below"]
    verdict = f"advised filter: {count['below']} of {measured} arms below {FLOOR:g} of bf16 beyond noise"
    verdict += f" ({'; '.join(below)})" if below else ""
    verdict += f", {count['unclear']} undecided" if count["unclear"] else ""
    return verdict + (f", {count['missing']} not measured" if count["missing"] else "")


def _arm(row: Mapping[str, Any], pair: Mapping[str, Any]) -> AdvisedArm:
    axes, advice = parse(row["axes"]), parse(row["resolved"]).get("advice")
    advice = advice if isinstance(advice, dict) else {}
    speedup, low, high, noise = (
        float(pair.get(name, math.nan)) for name in ("speedup", "low", "high", "floor")
    )
    converted = len(advice.get("converted") or ())
    outcome: AdviceOutcome = "unclear"
    if math.isnan(low) or math.isnan(high):
        outcome = "missing"
    elif pair.get("condition") in DISTURBED:
        outcome = "unclear"
    elif low >= FLOOR:
        outcome = "holds"
    # Two copies of the baseline seem `noise` apart, a ratio of at least 1; NaN: not known
    elif high < FLOOR and not 1 / speedup <= noise:
        outcome = "below"
    return AdvisedArm(
        run_id=row["run_id"],
        case_id=row["case_id"],
        arm=row["arm"],
        baseline=row["baseline"] or "",
        model=str(axes.get("model", "")),
        axes=axes,
        speedup=speedup,
        low=low,
        high=high,
        predicted=float((advice.get("predicted_step") or [math.nan])[0]),
        converted=converted,
        layers=converted + len(advice.get("left_in_bf16") or ()),
        outcome=outcome,
        reason=str(pair.get("reason") or row["reason"] or "") if outcome == "missing" else "",
    )
