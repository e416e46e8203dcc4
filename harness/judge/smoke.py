"""What the suites of checks say of this device: kernels and recipes that failed.

No torch: a pure function of stored rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.store.compare import rows_of
from harness.store.outside import parse

if TYPE_CHECKING:
    import pandas as pd

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
