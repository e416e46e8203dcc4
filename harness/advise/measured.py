"""Predictions beside what was measured on the same GPU: products, layers and training steps of stored runs.

A pure function of rows. A prediction outside of 0.8 to 1.25 times the measurement is called out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.advise.advice import Check
from harness.advise.decide import able
from harness.advise.layer import closed_form, layer_cost
from harness.advise.model import Linear
from harness.advise.recipes import candidates
from harness.advise.step import speedup
from harness.machine.ceilings import ceilings
from harness.store.case import Arm, arm_of
from harness.store.compare import DISTURBED, paired_ratios
from harness.store.outside import parse
from harness.store.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pandas as pd

    from harness.advise.casts import RecipeCost
    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.training.step import Step

_ISOLATED = "isolated"
_PREDICTED = ("eager", "compile")  # a step recorded as a graph waits for no launch


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


def layers(frame: pd.DataFrame, rates: Rates) -> list[Check]:
    """Speedups of the suite `linear`. A layer alone has no producer that could take the amax of its input."""
    checks = []
    for row, recipe, _ in _fp8_rows(frame, "linear"):
        if row["regime"] != _ISOLATED:
            continue
        axes = parse(row["axes"])
        M, K, N = (axes[size] for size in "MKN")
        predicted = layer_cost(Linear("", K, N, M, 0), alone(recipe), rates).speedup
        checks.append(Check("layer", f"{M}x{K}x{N}", row["arm"], predicted, row["speedup"], row["run_id"]))
    return checks


def steps(
    frame: pd.DataFrame,
    rates: Rates,
    step_of: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Model, Step] | None],
) -> list[Check]:
    """Speedups of the suite `train`, with those layers converted that the arm had: all that can be, or the advised ones.

    Args:
        frame: rows of one machine.
        rates: of that machine.
        step_of: axes of a case, and what was resolved of it -> its model and plan; None where that is not known.
    """
    own = frame[(frame["suite"] == "train") & (frame["metric"] == "time_ms")]
    resolved = {(r["run_id"], r["case_id"], r["arm"]): parse(r["resolved"]) for r in rows_of(own)}
    checks = []
    for row, recipe, mode in _fp8_rows(frame, "train"):
        found = resolved[row["run_id"], row["case_id"], row["arm"]]
        known = step_of(parse(row["axes"]), found) if mode in _PREDICTED else None
        if known is None:
            continue
        model, plan = known
        converted = able(model, recipe).difference(found.get("advice", {}).get("left_in_bf16", ()))
        predicted = speedup(model, rates, replace(plan, compiled=mode == "compile"), recipe, converted)
        found_ratio = predicted.value, row["speedup"], row["run_id"], predicted.low, predicted.high
        checks.append(Check("step", model.name, row["arm"], *found_ratio))
    return checks


def _fp8_rows(frame: pd.DataFrame, suite: str) -> Iterator[tuple[dict[str, Any], RecipeCost, str]]:
    """Measured ratios of arms of ours that cast as their mode does, with the recipe's costs and the mode."""
    for row in rows_of(paired_ratios(frame[(frame["suite"] == suite) & (frame["metric"] == "time_ms")])):
        arm = arm_of(row)
        recipe = candidates(arm.mode == "compile").get(arm.recipe)
        is_sound = math.isfinite(row["speedup"]) and row["condition"] not in DISTURBED
        plain = arm == Arm(arm.recipe, arm.mode) and row["fp8"] and is_sound
        if plain and recipe is not None:
            yield row, recipe, arm.mode


def alone(recipe: RecipeCost) -> RecipeCost:
    """The recipe of a layer that stands alone: the amax of its input takes a read of its own."""
    cast = recipe.casts["input"]
    if recipe.by != "compiler" or not recipe.one_scale or recipe.scaling != "dynamic":
        return recipe
    return replace(recipe, casts={**recipe.casts, "input": replace(cast, streamed=cast.streamed + 2.0)})
