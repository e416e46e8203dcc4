"""The bars that a training step in FP8 is held against, and whether stored runs pass them. A pure function of rows.

They are put to the model of `MODEL`, where the products decide; each by the paired ratio of two arms of one run, with its
interval, on the case with the most work that has both. What no run has is "not measured", with the reason; of another
model, the largest timed, its ratio is told. Finished rounds of a case that was cut off decide nothing: INCONCLUSIVE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.judge.model_title import title_of
from harness.store.arm import arm_of
from harness.store.compare import against, rows_of
from harness.store.json_columns import parse
from harness.store.text import plural

if TYPE_CHECKING:
    import pandas as pd

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "not measured"]

MODEL = "llama3_8b"  # as a whole, or cut to the layers that fit
LEAST_OVER_BF16 = 1.15
_ABOVE: dict[str, Outcome] = {
    "faster": "PASS",
    "same": "FAIL",
    "slower": "FAIL",
    "unclear": "INCONCLUSIVE",
}
_NOT_BELOW: dict[str, Outcome] = {**_ABOVE, "same": "PASS"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `arm` is to be faster than `against`, by so much.

    Attributes:
        words: what is asked, as in "at least 1.15x of bf16 eager".
        least: the ratio that the whole interval must reach; None where `by_verdict` decides.
        by_verdict: what each verdict of a pair means, beyond the noise of this case.
    """

    arm: str
    against: str
    words: str
    least: float | None = None
    by_verdict: dict[str, Outcome] | None = None


BARS = (
    Bar(
        "tensorwise_eager",
        "bf16_eager",
        f"at least {LEAST_OVER_BF16:g}x of bf16 eager",
        least=LEAST_OVER_BF16,
    ),
    Bar(
        "tensorwise_eager",
        "nocompile_tensorwise_eager",
        "above float8nocompile beyond noise",
        by_verdict=_ABOVE,
    ),
    Bar(
        "tensorwise_compile",
        "torchao_tensorwise_compile",
        "not below torchao compile",
        by_verdict=_NOT_BELOW,
    ),
)


@dataclass(frozen=True, slots=True)
class Held:
    """A bar and what the rows say of it; the ratio and its 95 % interval are NaN where it was not measured."""

    bar: Bar
    model: str
    outcome: Outcome
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    cut_off: bool = False
    rounds: int = 0  # that the ratio is of

    def __str__(self) -> str:
        asked = f"{self.bar.arm} {self.bar.words}"
        if self.outcome == "not measured":
            return f"{asked}: not measured ({self.reason})"
        why = f", {cut_off(self.rounds)}" if self.cut_off else ""
        return f"{asked}: {self.outcome}, {self.ratio:.3f}x ({self.low:.3f} to {self.high:.3f}) on {self.model}{why}"


def held(frame: pd.DataFrame) -> list[Held]:
    """Every bar, for the rows of one machine."""
    steps = frame[(frame["suite"] == "train") & (frame["metric"] == "time_ms")]
    return [_held(bar, _told(steps, bar)) for bar in BARS]


def _model(axes: str) -> str:
    return str(parse(axes)["model"])


def _told(steps: pd.DataFrame, bar: Bar) -> pd.DataFrame:
    """The newest rows of a case with both arms of the bar, of `MODEL` and with the most work; empty where none was timed.

    A case that has only one of them comes after all others: its rows say why the other one is lacking.
    """
    work: dict[tuple[str, str], tuple[bool, int, bool, float]] = {}
    timed = rows_of(steps[steps["status"].isin(["ok", "partial"])])
    arms: dict[tuple[str, str], set[str]] = {}
    for r in timed:
        arms.setdefault((r["run_id"], r["case_id"]), set()).add(r["arm"])
    for r in timed:
        if arm_of(r).control:
            continue
        key = r["run_id"], r["case_id"]
        has = len({bar.arm, bar.against} & arms[key])
        whole = r["status"] == "ok"
        amount = sum(parse(r["flops"]).values())
        found = (_model(r["axes"]) == MODEL, has, whole, amount)
        work[key] = max(work.get(key, found), found)
    if not work:
        return steps[:0]
    run_id, case_id = max(work, key=lambda key: (*work[key], key[0]))
    return steps[(steps["case_id"] == case_id) & (steps["run_id"] == run_id)]


def _held(bar: Bar, rows: pd.DataFrame) -> Held:
    timed = rows_of(rows[rows["status"].isin(["ok", "partial"])])
    model = title_of(timed[0]) if timed else ""
    pairs = rows_of(against(rows, bar.arm, bar.against, partial=True)) if len(rows) else []
    found = [r for r in pairs if r["regime"] != "sustained"]
    if not found:
        return Held(bar, model, "not measured", reason=f"no row of {bar.arm}")
    (pair,) = found[:1]
    if math.isnan(pair["low"]):
        return Held(bar, model, "not measured", reason=pair["reason"])
    if _model(timed[0]["axes"]) != MODEL:
        ratio = f"{pair['speedup']:.3f}x ({pair['low']:.3f} to {pair['high']:.3f})"
        return Held(bar, model, "not measured", reason=f"no step of {MODEL} was timed; {ratio} on {model}")
    outcome: Outcome
    if pair["cut_off"]:
        outcome = "INCONCLUSIVE"
    elif bar.by_verdict is not None:
        outcome = bar.by_verdict[pair["verdict"]]
    else:
        assert bar.least is not None
        outcome = (
            "PASS" if pair["low"] >= bar.least else "FAIL" if pair["high"] < bar.least else "INCONCLUSIVE"
        )
    figures = pair["speedup"], pair["low"], pair["high"]
    return Held(bar, model, outcome, *figures, pair["reason"], pair["cut_off"], pair["rounds"])


def cut_off(rounds: int) -> str:
    """Words for a pair whose case did not finish: the rounds in which both arms were timed."""
    return f"cut off after {plural(rounds, 'round')}"
