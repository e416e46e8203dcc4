"""Gradients: gate L6, the scale of the gradients of runs that are paired by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.result import MIN_SEEDS, CannotTell, GateResult, GateStatus
from harness.store import stats

if TYPE_CHECKING:
    from harness.judge.verdict.curves import Pairs
    from harness.store.stats import Estimate, Vector

    Span = tuple[float, float]  # first step, and the first one after it

MOST_REPEATED = (
    1 / 4
)  # share of a run's gradient norms that equal the one before; beyond it they were clipped, or are stuck
GRAD_BAND = (0.98, 1.02)  # of the ratio to the control
GRAD_WARN, GRAD_FAIL = 0.01, 0.05  # of the ratio to the golden arm, in either direction
FAIL_TIMES = 4.0  # FAIL beyond so many bands
_LARGEST = 1000.0  # of a norm's ratio, in either direction: beyond it the size says no more, and zero has no logarithm
_USUAL = (1 - FAIL_TIMES * (1 - GRAD_BAND[0]), 1 + FAIL_TIMES * (GRAD_BAND[1] - 1))  # four bands
_WORST: tuple[GateStatus, ...] = ("FAIL", "INCONCLUSIVE", "WARN", "PASS")


def gradients(pairs: Pairs, golden: Pairs | None, span: Span) -> GateResult:
    """L6: the scale of the gradients, which a loss under AdamW hides: the ratio of the candidate's gradient norms to the
    golden arm's, and to the control's.

    AdamW divides each gradient by its own running size, so gradients that are 2 % too large train as well as right ones.
    The norm is compared with that of the golden arm (the same recipe emulated, the same weights and batches), since a
    recipe itself can change it: on a small transformer tensorwise with e5m2 gradients raises it by 1 to 3 %. It is that of
    the converted layers' weights where both arms stored it: in the norm of the whole model a head that is not converted
    hides most of an error (docs/loss-verdict-evidence.md).

    Two ratios to the golden arm are judged, and the worse one decides: the median over steps, and that of step 0, where
    the weights of both arms are still equal and the ratio is exact but for the order of additions. Either is PASS, WARN
    beyond 1 %, FAIL beyond 5 %, where its 95 % interval over seeds lies wholly beyond, and INCONCLUSIVE where the interval
    reaches beyond 5 %. The ratio to the control is reported beside them, outside `GRAD_BAND` with that of the golden arm.
    Beyond four bands the gate can't tell: the recipe changes the norm so much, or candidate and golden arm share a fault.

    Without three golden runs nobody can tell the recipe from a fault: the ratio to the control is INCONCLUSIVE from
    `GRAD_BAND` up to four bands and where its interval reaches beyond those, and the sentence says what it does not see.
    """
    enough_pairs(pairs)
    ratios = _against_control(pairs, span)
    if ratios is None:
        raise CannotTell("no gradient norms above 0 at the same steps in every run")
    control = stats.geometric_mean(ratios)
    is_usual = GRAD_BAND[0] <= control.value <= GRAD_BAND[1]
    is_far = control.value < _USUAL[0] or control.value > _USUAL[1]
    found = None if golden is None else _against_golden(pairs, golden, span)
    if golden is None or found is None:
        status: GateStatus = "INCONCLUSIVE"
        if is_usual and not _reaches(control, _USUAL[1] - 1):
            status = "PASS"
        elif control.high < _USUAL[0] or control.low > _USUAL[1]:
            status = "FAIL"
        sentence = (
            f"gradients {_shown(control)} times the control's, against {GRAD_BAND[0]} to {GRAD_BAND[1]}; without three golden "
            "runs the recipe's own effect is not known, and an error of the gradients' scale of "
            f"{100 * (GRAD_BAND[1] - 1):g} % or less, or within the interval, is not seen"
        )
        return _ratio(status, sentence, ratios, (GRAD_BAND if status == "PASS" else _USUAL)[1] - 1)
    what, steps, logs = found
    sizes = [np.exp(np.median(logs, axis=1))]
    median = stats.geometric_mean(sizes[0])
    sentence = f"gradients {median.value:.3f} times the golden arm's ({median.low:.3f} to {median.high:.3f}; {what}; median over steps)"
    if steps[0] == 0:
        sizes.append(np.exp(logs[:, 0]))
        sentence += f", at step 0 {_shown(stats.geometric_mean(sizes[1]))}"
    sentence += f"; WARN beyond {100 * GRAD_WARN:g} %, FAIL beyond {100 * GRAD_FAIL:g} %; {_shown(control)} times the control's"
    if not is_usual and (own := _against_control(golden, span)) is not None:
        sentence += f", the golden arm {_shown(stats.geometric_mean(own))}: "
        sentence += "the recipe, or a fault of both" if is_far else "the recipe's own effect"
    statuses: list[tuple[GateStatus, Vector]] = [(_scale(size), size) for size in sizes]
    statuses.append(("INCONCLUSIVE" if is_far else "PASS", ratios))
    status, worst = min(statuses, key=lambda one: _WORST.index(one[0]))
    limit = _USUAL[1] - 1 if worst is ratios else GRAD_WARN if status in ("PASS", "WARN") else GRAD_FAIL
    return _ratio(status, sentence, worst, limit)


def enough_pairs(pairs: Pairs) -> None:
    """Raises CannotTell where pairs are too few for an interval."""
    if len(pairs.seeds) < MIN_SEEDS:
        raise CannotTell(
            f"{len(pairs.seeds)} paired seeds; {MIN_SEEDS} are the least that has an interval, 5 the default"
        )


def _scale(ratios: Vector) -> GateStatus:
    """What ratios to the golden arm, which should be 1, say of an implementation."""
    size = stats.geometric_mean(ratios)
    fail, warn = (size.low > 1 + limit or size.high < 1 / (1 + limit) for limit in (GRAD_FAIL, GRAD_WARN))
    return "FAIL" if fail else "INCONCLUSIVE" if _reaches(size, GRAD_FAIL) else "WARN" if warn else "PASS"


def _reaches(size: Estimate, limit: float) -> bool:
    """A part of the interval lies beyond 1 + limit or its inverse."""
    return size.high > 1 + limit or size.low < 1 / (1 + limit)


def _shown(size: Estimate) -> str:
    return f"{size.value:.3f} ({size.low:.3f} to {size.high:.3f})"


def _against_control(pairs: Pairs, span: Span) -> Vector | None:
    """Candidate over control by seed, median over the steps of the span; None where a norm is missing or not above 0."""
    if pairs.grad_norm is None:
        return None
    steps, mine, theirs = pairs.grad_norm
    logs = _log_ratios(steps, mine, theirs, span)
    return None if logs is None else np.exp(np.median(logs, axis=1))


def _against_golden(pairs: Pairs, golden: Pairs, span: Span) -> tuple[str, Vector, Vector] | None:
    """(whose norm, steps, log(candidate / golden)) of the seeds of both; None for under three or without norms.

    Raises:
        CannotTell: norms that both stored cannot be compared; the other norm would hide what is wrong with them.
    """
    seeds = [s for s in pairs.seeds if s in golden.seeds]
    if len(seeds) < MIN_SEEDS:
        return None
    mine, theirs = ([of.seeds.index(s) for s in seeds] for of in (pairs, golden))
    for what, own, other in (
        ("weights of the FP8 layers", pairs.fp8_grad_norm, golden.fp8_grad_norm),
        ("whole model, which dilutes an error in the FP8 layers", pairs.grad_norm, golden.grad_norm),
    ):
        if own is None or other is None or not np.array_equal(own[0], other[0]):
            continue
        steps = own[0]
        logs = _log_ratios(steps, own[1][mine], other[1][theirs], span)
        if logs is None:
            raise CannotTell(f"the golden arm's gradient norm ({what}) is 0 at some step")
        return what, steps[(steps >= span[0]) & (steps < span[1])], logs
    return None


def _log_ratios(steps: Vector, mine: Vector, theirs: Vector, span: Span) -> Vector | None:
    """log(mine / theirs), [S, steps of the span]; None where there is none, or one of theirs is not above 0.

    Raises:
        CannotTell: norms repeat themselves. Zeros are no such: gradients that vanish are a fault.
    """
    inside = (steps >= span[0]) & (steps < span[1])
    mine, theirs = mine[:, inside], theirs[:, inside]
    if not mine.size or (theirs <= 0).any():
        return None
    for norms in (mine, theirs):
        repeated = np.diff(np.where(norms > 0, norms, np.nan), prepend=np.nan) == 0
        if repeated.mean(axis=1).max() > MOST_REPEATED:
            raise CannotTell(
                "gradient norms repeat from step to step: they show nothing; log them before they are clipped"
            )
    return np.asarray(np.log(np.clip(mine / theirs, 1 / _LARGEST, _LARGEST)), np.float64)


def _ratio(status: GateStatus, sentence: str, ratios: Vector, margin: float) -> GateResult:
    size = stats.geometric_mean(ratios)
    sd = float(ratios.std(ddof=1))
    return GateResult(
        "L6", status, sentence, size.value, size.low, size.high, sd, ratios.size, margin, "ratio"
    )
