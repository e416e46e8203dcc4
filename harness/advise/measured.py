"""Predictions beside what was measured on the same GPU: products, layers and training steps of stored runs.

A pure function of rows. A prediction outside of 0.8 to 1.25 times the measurement is called out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.advise.gemm import closed_form
from harness.advise.model import Linear
from harness.advise.step import Ratio, layer_cost, speedup
from harness.machine.ceilings import ceilings
from harness.store.arm import Arm, arm_of
from harness.store.compare import paired_ratios, rows_of
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd

    from harness.advise.casts import RecipeCost
    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.advise.step import Plan

TRUSTED = (0.8, 1.25)
_ISOLATED = "isolated"
_PREDICTED = ("eager", "compile")  # a step recorded as a graph waits for no launch


@dataclass(frozen=True, slots=True)
class Check:
    """One prediction and its measurement.

    Attributes:
        what: "product" (milliseconds), "layer" or "step" (speedups).
        case: sizes or model.
        arm: what ran.
        predicted, measured: in the same unit.
        run_id: of the measurement.
    """

    what: str
    case: str
    arm: str
    predicted: float
    measured: float
    run_id: str

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def trusted(self) -> bool:
        """The prediction lies within `TRUSTED` of the measurement."""
        return TRUSTED[0] <= self.predicted / self.measured <= TRUSTED[1]


def products(frame: pd.DataFrame, rates: Rates) -> list[Check]:
    """Each measured product against the closed form, which knows only the rate of the longest one."""
    found = ceilings(frame)
    return [
        Check(
            "product",
            f"{p.M}x{p.K}x{p.N} {p.role}",
            p.kind,
            1e3 * closed_form(rates, p.kind, p.M, p.K, p.N),
            1e3 * p.seconds,
            p.run_id,
        )
        for p in (found.products if found else ())
    ]


def layers(
    frame: pd.DataFrame, rates: Rates, recipe_of: Callable[[str, bool], RecipeCost | None]
) -> list[Check]:
    """Speedups of the suite `linear`. A layer alone has no producer that could take the amax of its input.

    Args:
        frame: rows of one machine.
        rates: of that machine.
        recipe_of: (name, compiled) -> its costs; None for a recipe that is not ours.
    """
    rows = paired_ratios(frame[(frame["suite"] == "linear") & (frame["metric"] == "time_ms")])
    checks = []
    for row in rows_of(rows[rows["regime"] == _ISOLATED]):
        arm = arm_of(row)
        recipe = recipe_of(_plain_recipe(arm), arm.mode == "compile")
        axes = parse(row["axes"])
        if recipe is None or not row["fp8"] or not math.isfinite(row["speedup"]):
            continue
        layer = Linear("", axes["K"], axes["N"], axes["M"], 0)
        predicted = layer_cost(layer, alone(recipe), rates).speedup
        case = f"{axes['M']}x{axes['K']}x{axes['N']}"
        checks.append(Check("layer", case, row["arm"], predicted, row["speedup"], row["run_id"]))
    return checks


def steps(
    frame: pd.DataFrame,
    rates: Rates,
    traced: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Model, Plan] | None],
    recipe_of: Callable[[str, bool], RecipeCost | None],
) -> list[Check]:
    """Speedups of the suite `train`, with those layers converted that the arm had: all that can be, or the advised ones.

    Args:
        frame: rows of one machine.
        rates: of that machine.
        traced: axes of a case, and what was resolved of it -> its model and plan; None where that cannot be told.
        recipe_of: as for `layers`.
    """
    own = frame[(frame["suite"] == "train") & (frame["metric"] == "time_ms")]
    resolved = {(r["run_id"], r["case_id"], r["arm"]): parse(r["resolved"]) for r in rows_of(own)}
    checks = []
    for row in rows_of(paired_ratios(own)):
        arm = arm_of(row)
        recipe, mode = recipe_of(_plain_recipe(arm), arm.mode == "compile"), arm.mode
        if recipe is None or mode not in _PREDICTED or not row["fp8"] or not math.isfinite(row["speedup"]):
            continue
        found = resolved[row["run_id"], row["case_id"], row["arm"]]
        known = traced(parse(row["axes"]), found)
        if known is None:
            continue
        model, plan = known
        left_out = found.get("advice", {}).get("left_in_bf16", ())
        converted = {la.fqn for la in model.layers if recipe.name not in la.barred and la.fqn not in left_out}
        predicted = speedup(model, rates, replace(plan, compiled=mode == "compile"), recipe, converted)
        checks.append(Check("step", model.name, row["arm"], predicted.value, row["speedup"], row["run_id"]))
    return checks


def _plain_recipe(arm: Arm) -> str:
    """The recipe of an arm of ours that casts as its mode does; "" of every other arm."""
    return arm.recipe if arm == Arm(arm.recipe, arm.mode) else ""


def alone(recipe: RecipeCost) -> RecipeCost:
    """The recipe of a layer that stands alone: the amax of its input takes a read of its own."""
    cast = recipe.casts["input"]
    if recipe.by != "compiler" or recipe.name != "tensorwise":
        return recipe
    return replace(recipe, casts={**recipe.casts, "input": replace(cast, streamed=cast.streamed + 2.0)})


def spread(checks: list[Check]) -> Ratio | None:
    """Geometric mean of predicted over measured, with the range that holds 95 % of them; None for fewer than three."""
    if len(checks) < 3:
        return None
    logs = [math.log(check.predicted / check.measured) for check in checks]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1))
    return Ratio(math.exp(mean), math.exp(mean - 2 * deviation), math.exp(mean + 2 * deviation))
