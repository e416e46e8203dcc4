"""Gradients: the scale of the gradients, which a loss under AdamW hides (gate L6).

AdamW divides each gradient by its own running size, so gradients that are 2 % too large train as well as right ones. Only
their norm shows it. It is compared with that of the golden arm (the same recipe emulated, the same weights and batches),
since a recipe itself can change the norm: on a small transformer tensorwise with e5m2 gradients raises it by 1 to 3 %.
The norm is that of the converted layers' weights where both arms stored it: in the norm of the whole model a head that is
not converted hides most of an error (docs/loss-verdict-evidence.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.gates import WHOLE, Span
from harness.judge.verdict.result import (
    FAIL_TIMES,
    GRAD_BAND,
    GRAD_FAIL,
    GRAD_WARN,
    MIN_SEEDS,
    GateResult,
    Status,
    too_little,
)
from harness.store import stats

if TYPE_CHECKING:
    from harness.judge.verdict.curves import Pairs
    from harness.store.stats import Vector

_LARGEST = math.log(
    1000.0
)  # of a ratio, in either direction: beyond it the size says no more, and zero has no logarithm
_USUAL = (1 - FAIL_TIMES * (1 - GRAD_BAND[0]), 1 + FAIL_TIMES * (GRAD_BAND[1] - 1))  # four bands
_WORST: tuple[Status, ...] = ("FAIL", "INCONCLUSIVE", "WARN", "PASS")


@dataclass(frozen=True, slots=True)
class _Size:
    """Ratio of two norms: geometric mean over seeds with its 95 % t interval."""

    value: float
    low: float
    high: float
    sd: float
    seeds: int

    @classmethod
    def of(cls, log_ratios: Vector) -> _Size:
        low, high = stats.t_interval(log_ratios)
        value, sd = math.exp(log_ratios.mean()), float(np.exp(log_ratios).std(ddof=1))
        return cls(value, math.exp(low), math.exp(high), sd, log_ratios.size)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def beyond(self, limit: float) -> bool:
        """The interval lies wholly beyond 1 + limit or its inverse."""
        return self.low > 1 + limit or self.high < 1 / (1 + limit)

    def reaches(self, limit: float) -> bool:
        """A part of the interval lies beyond 1 + limit or its inverse."""
        return self.high > 1 + limit or self.low < 1 / (1 + limit)

    @property
    def status(self) -> Status:
        """What it says of an implementation whose ratio to the golden arm should be 1."""
        if self.beyond(GRAD_FAIL):
            return "FAIL"
        if self.reaches(GRAD_FAIL):
            return "INCONCLUSIVE"
        return "WARN" if self.beyond(GRAD_WARN) else "PASS"

    def result(self, status: Status, sentence: str, margin: float) -> GateResult:
        return GateResult(
            "L6", status, sentence, self.value, self.low, self.high, self.sd, self.seeds, margin, "ratio"
        )


def gradients(pairs: Pairs, golden: Pairs | None = None, span: Span = WHOLE) -> GateResult:
    """L6: the ratio of the candidate's gradient norms to the golden arm's, and to the control's.

    Two ratios to the golden arm are judged, and the worse one decides: the median over steps, and that of step 0, where
    the weights of both arms are still equal and the ratio is exact but for the order of additions. Either is PASS, WARN
    beyond 1 %, FAIL beyond 5 %, where its 95 % interval over seeds lies wholly beyond, and INCONCLUSIVE where the interval
    reaches beyond 5 %. The ratio to the control is reported beside them, outside `GRAD_BAND` with that of the golden arm.
    Beyond four bands the gate can't tell: the recipe changes the norm so much, or candidate and golden arm share a fault.

    Without three golden runs nobody can tell the recipe from a fault: the ratio to the control is INCONCLUSIVE from
    `GRAD_BAND` up to four bands and where its interval reaches beyond those, and the sentence says what it does not see.

    Args:
        pairs: candidate and control.
        golden: the golden emulation of the same recipe and the control.
        span: the steps in which the precisions differ; the others would dilute the median.
    """
    missing = too_little(pairs, "L6")
    if missing:
        return missing
    logs = _against_control(pairs, span)
    if logs is None:
        said = "no gradient norms above 0 at the same steps in every run"
        return GateResult("L6", "INCONCLUSIVE", said, seeds=len(pairs.seeds))
    control = _Size.of(np.median(logs, axis=1))
    found = _against_golden(pairs, golden, span) if golden is not None else None
    if golden is None or found is None:
        return _alone(control)
    if isinstance(found, str):
        return GateResult("L6", "INCONCLUSIVE", found, seeds=len(pairs.seeds))
    what, steps, logs = found
    median = _Size.of(np.median(logs, axis=1))
    judged = [(median, median.status)]
    sentence = f"gradients {median.value:.3f} times the golden arm's ({median.low:.3f} to {median.high:.3f}; {what}; median over steps)"
    if steps[0] == 0:
        first = _Size.of(logs[:, 0])
        judged.append((first, first.status))
        sentence += f", at step 0 {first}"
    is_usual = GRAD_BAND[0] <= control.value <= GRAD_BAND[1]
    is_far = control.value < _USUAL[0] or control.value > _USUAL[1]
    judged.append((control, "INCONCLUSIVE" if is_far else "PASS"))
    sentence += f"; WARN beyond {100 * GRAD_WARN:g} %, FAIL beyond {100 * GRAD_FAIL:g} %; {control} times the control's"
    if not is_usual and (own := _against_control(golden, span)) is not None:
        sentence += f", the golden arm {_Size.of(np.median(own, axis=1))}: "
        sentence += "the recipe, or a fault of both" if is_far else "the recipe's own effect"
    size, status = min(judged, key=lambda one: _WORST.index(one[1]))
    limit = _USUAL[1] - 1 if size is control else GRAD_WARN if status in ("PASS", "WARN") else GRAD_FAIL
    return size.result(status, sentence, limit)


def _alone(control: _Size) -> GateResult:
    """The result without a golden arm, by the ratio to the control."""
    low, high = GRAD_BAND
    status: Status = "INCONCLUSIVE"
    if low <= control.value <= high and not control.reaches(_USUAL[1] - 1):
        status = "PASS"
    elif control.high < _USUAL[0] or control.low > _USUAL[1]:
        status = "FAIL"
    sentence = (
        f"gradients {control} times the control's, against {low} to {high}; without three golden runs the recipe's own effect is "
        f"not known, and an error of the gradients' scale of {100 * (high - 1):g} % or less, or within the interval, is not seen"
    )
    return control.result(status, sentence, high - 1 if status == "PASS" else _USUAL[1] - 1)


def _against_control(pairs: Pairs, span: Span) -> Vector | None:
    """log(candidate / control), [S, steps of the span]; None where a norm is missing or the control's is not above 0."""
    if pairs.grad_norm is None:
        return None
    steps, mine, theirs = pairs.grad_norm
    inside = (steps >= span[0]) & (steps < span[1])
    return _logs(mine[:, inside], theirs[:, inside])


def _against_golden(pairs: Pairs, golden: Pairs, span: Span) -> tuple[str, Vector, Vector] | str | None:
    """(whose norm, steps, log(candidate / golden)) of the seeds of both; None for under three or without norms.

    Norms that both stored and that cannot be compared are a sentence: the other norm would hide what is wrong with them.
    """
    seeds = [s for s in pairs.seeds if s in golden.seeds]
    if len(seeds) < MIN_SEEDS:
        return None
    rows = [pairs.seeds.index(s) for s in seeds], [golden.seeds.index(s) for s in seeds]
    for what, mine, theirs in (
        ("weights of the FP8 layers", pairs.fp8_grad_norm, golden.fp8_grad_norm),
        ("whole model, which dilutes an error in the FP8 layers", pairs.grad_norm, golden.grad_norm),
    ):
        if mine is None or theirs is None or not np.array_equal(mine[0], theirs[0]):
            continue
        steps = mine[0]
        inside = (steps >= span[0]) & (steps < span[1])
        logs = _logs(mine[1][rows[0]][:, inside], theirs[1][rows[1]][:, inside])
        if logs is None:
            return f"the golden arm's gradient norm ({what}) is 0 at some step"
        return what, steps[inside], logs
    return None


def _logs(mine: Vector, theirs: Vector) -> Vector | None:
    if not mine.size or (theirs <= 0).any():
        return None
    ratios = np.maximum(mine / theirs, math.exp(-_LARGEST))
    return np.asarray(np.minimum(np.log(ratios), _LARGEST), np.float64)
