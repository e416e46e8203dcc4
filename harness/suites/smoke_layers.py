"""Suite `smoke_layers`: one FP8 layer by recipe, forward and backward once, and `fp8core.verify`.

Each recipe's results must lie within `BOUND_DB` of those of the same layer without FP8, and the proof must hold. What
operators of fp8core ran is in `resolved.operators`: a recipe depends on those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fp8core.history import update_scales
from fp8core.proof.verify import verify
from fp8core.recipe import RECIPES
from harness.store.case import Arm
from harness.store.errors import Cause
from harness.suites import axes_of, linear
from harness.suites.common import crossed_points, profiled, recipe_unsupported
from harness.suites.extended import extended_table
from harness.timing import metrics
from harness.timing.workload import ArmInfo, Series, Trial, Unsupported
from harness.training.steps import cause_of_fault, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.store.case import Case

METRIC = "sqnr_db"  # of a row that says why there is no figure
BOUND_DB = 15.0  # E5M2 has 2 bits: a product of operands so rounded lies at some 20 dB
AXES = axes_of("smoke_layers")
ARMS = extended_table(
    {Arm(name): ArmInfo(f"a layer of recipe {name}", recipe=name) for name in RECIPES},
    RECIPES,
)


points = crossed_points("smoke_layers", "sizes by axes.M, axes.K and axes.N", AXES)
work = linear.work


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """A layer of that recipe."""
    return recipe_unsupported(RECIPES[arm], case.integer("M"), device)


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """One layer, over the operands of suite `linear`."""
    x, weight, grad = linear.operands(case, device)
    layer = linear.make_layer(weight, RECIPES[arm])
    passes = linear.step_of(layer)
    results, events = profiled(lambda: passes(x, grad), device)
    on_step(1, 2)
    plain = linear.step_of(linear.make_layer(weight, None))(x, grad)
    figures = [metrics.sqnr_db(mine, other) for mine, other in zip(results, plain, strict=True)]
    worst = float(np.min(figures))  # NaN where any is, which `min` would pass over

    def step() -> None:
        passes(x, grad)
        update_scales(layer)

    proof = verify(step, layer, recipe=RECIPES[arm], announce=False)
    on_step(2, 2)
    operators = {event.name for event in events if event.name.startswith("fp8core::")}
    resolved: dict[str, object] = {
        "recipe": arm,
        "operators": sorted(name.removeprefix("fp8core::") for name in operators),
        **facts_of(proof),
    }
    fault, cause = ("", Cause.NONE) if proof.ok else (proof.line, cause_of_fault(resolved))
    if not worst >= BOUND_DB:
        fault = f"{worst:.1f} dB from the layer without FP8, {BOUND_DB:g} expected"
        cause = Cause.NUMERICS
    failure = fault and f"a layer of recipe {arm}: {fault}"
    return Trial((Series(METRIC, (worst,), (0,)),), resolved, failure=failure, cause=cause)
