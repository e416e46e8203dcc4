"""`sweep=divergence bisect=ARM`: which layers and which of their GEMMs make an arm fail its verdict.

Trains the arm again and again with parts of it held in high precision (`harness.training.bisect`), over all seeds of
the sweep, and asks the verdict each time. Only FAIL counts as failing: where the verdict can't tell, a part is not
accused. Nothing is stored; what is found is printed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fp8core import PrecisionSchedule, audit
from fp8core.recipe import GEMMS
from harness.judge.verdict import Curve, Run, judge_pairs
from harness.store.case import EPS
from harness.store.errors import UsageError, unknown
from harness.suites import divergence
from harness.training import meta_estimate
from harness.training.bisect import NotFP8Error, locate, schedule_with
from harness.training.loop import train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.engine.plan import Plan
    from harness.store.case import Case
    from harness.training.loop import Result


def check(plan: Plan, arm: str, resume: str | None = None) -> list[Case]:
    """The cases of a plan in which an arm can be bisected.

    Raises:
        UsageError: another sweep, an arm that can't be bisected, or resume=.
    """
    cases = [c.case for c in plan.cases if c.suite is divergence]
    if not cases:
        raise UsageError(
            f"bisect={arm}: what is bisected is a verdict on training runs, which only sweep=divergence has"
        )
    if resume:
        raise UsageError(f"bisect={arm}: a bisection stores nothing, so resume={resume} cannot continue it")
    if arm not in divergence.ARMS:
        raise unknown("arm", arm, divergence.ARMS)
    if (
        divergence.recipe_of(arm) is None
        or divergence.schedule_of(cases[0], arm).rules
        or divergence.ARMS[arm].arm.variant == EPS
    ):
        raise UsageError(f"bisect={arm}: expected an arm that runs FP8 from the first step to the last")
    return cases


def run(plan: Plan, arm: str, device: str, tell: Callable[[str], None]) -> Iterator[str]:
    """Bisects an arm of each set-up of a plan; yields what was found, a line at a time.

    Args:
        plan: of sweep=divergence; its seeds are trained together.
        arm: one with FP8 from the first step to the last.
        device: "cpu" or "cuda".
        tell: called with each set of runs as it is judged.

    Raises:
        UsageError: as `check`.
    """
    cases = check(plan, arm)
    setups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        setups.setdefault(tuple(pair for pair in case.axes if pair[0] != "seed"), []).append(case)
    for members in setups.values():
        yield from _find(members, arm, device, tell)


def _find(cases: Sequence[Case], arm: str, device: str, tell: Callable[[str], None]) -> Iterator[str]:
    skeleton = meta_estimate.skeleton(divergence.setup_of(cases[0], arm))
    layers = [layer.fqn for layer in audit(skeleton).converted]
    control = {case.integer("seed"): _trained(case, divergence.BASE, device, "") for case in cases}

    def fails(in_fp8: frozenset[str]) -> bool:
        text = schedule_with(layers, in_fp8)
        candidate = {case.integer("seed"): _trained(case, arm, device, text) for case in cases}
        verdict = judge_pairs(candidate, control)
        tell(f"{len(in_fp8)} of {len(layers) * len(GEMMS)} GEMMs in FP8: {verdict.outcome}")
        return verdict.outcome == "FAIL"

    try:
        by_layer, by_gemm = locate(layers, fails)
    except NotFP8Error as error:
        yield f"{arm}: {error}"
        return
    yield f"{arm}, layers: {by_layer}"
    if by_gemm is not None:
        yield f"{arm}, GEMMs: {by_gemm}"


def _trained(case: Case, arm: str, device: str, schedule: str) -> Run:
    job = divergence.job_of(case, arm, device)
    job.schedule = PrecisionSchedule.parse(schedule)
    return _run(train(job, device), job.regime.steps)


def _run(result: Result, steps: int) -> Run:
    def curve(metric: str) -> Curve | None:
        points = result.curves.points.get((metric, ""), [])
        return Curve.of([value for _, value in points], [step for step, _ in points]) if points else None

    return Run(
        # NaN at the very first step leaves no point; the run still is one, and it broke.
        loss=curve("loss") or Curve.of([math.nan]),
        heldout=curve("heldout_loss"),
        grad_norm=curve("grad_norm"),
        planned_steps=steps,
        nonfinite_step=result.nonfinite_step,
        stopped=result.stopped,
    )
