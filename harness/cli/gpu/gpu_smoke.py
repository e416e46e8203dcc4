"""What a GPU session learns from rows while it runs: arms that must be left out, and how much a part that was cut kept.

No torch: a pure function of stored rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.store import arm as arms
from harness.store.arm import PRODUCT, controls
from harness.store.compare import rows_of
from harness.store.json_columns import parse

if TYPE_CHECKING:
    import pandas as pd

    from harness.cli.gpu.gpu_stages import Stage

KERNELS, LAYERS = "smoke_kernels", "smoke_layers"


def failed_kernels(smoke: pd.DataFrame) -> dict[str, str]:
    """Operators of fp8core that do not build, run or agree with their reference here, with the reason."""
    rows = smoke[(smoke["suite"] == KERNELS) & (smoke["status"] == "failed")]
    return {parse(r["axes"])["kernel"]: r["reason"] for r in rows_of(rows)}


def failed_recipes(smoke: pd.DataFrame) -> dict[str, str]:
    """Recipes whose layer failed, or ran an operator that failed, with the reason."""
    kernels = failed_kernels(smoke)
    found: dict[str, str] = {}
    for r in rows_of(smoke[smoke["suite"] == LAYERS]):
        ran = parse(r["resolved"]).get("operators", ())
        broken = [f"kernel {name}: {kernels[name]}" for name in ran if name in kernels]
        if r["status"] == "failed" or broken:
            found[r["arm"]] = broken[0] if broken else r["reason"]
    return found


def left_out(stage: Stage, smoke: pd.DataFrame | None) -> dict[str, str]:
    """Arms of a part that must not be measured on this device, with the reason.

    Args:
        stage: the part.
        smoke: rows of the parts that check kernels and layers; None where there are none, and nothing is left out.
    """
    if smoke is None:
        return {}
    kernels, recipes = failed_kernels(smoke), failed_recipes(smoke)
    found: dict[str, str] = {}
    for arm in stage.arms:
        broken = [f"kernel {name}: {kernels[name]}" for name in stage.needs.get(arm, ()) if name in kernels]
        fields = arms.parse(arm)
        if not broken and not fields.peer and fields.mode not in ("", PRODUCT) and fields.recipe in recipes:
            broken = [f"recipe {fields.recipe}: {recipes[fields.recipe]}"]
        if broken:
            found[arm] = broken[0]
    return found


def kept(frame: pd.DataFrame | None) -> str:
    """In words, what a part has stored."""
    if frame is None or frame.empty:
        return "nothing stored"
    timed = frame[frame["status"].isin(["ok", "partial"])]
    cases = timed.groupby(["case_id", "arm"]).ngroups
    cut = timed[(timed["status"] == "partial") & ~controls(timed)]
    if cut.empty:
        return f"{cases} cases and arms whole"
    rounds = cut["rounds"].map(lambda of: len(set(of))).max()
    whole = cases - cut.groupby(["case_id", "arm"]).ngroups
    arms = ", ".join(sorted(cut["arm"].unique()))
    return f"{whole} cases and arms whole, {rounds} rounds of {arms}"
