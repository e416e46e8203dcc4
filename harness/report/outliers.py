"""Outliers: where casts break."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.report.drawing import Chart, sheet, styled
from harness.report.looks import look
from harness.store import text
from harness.store.arm import parse

if TYPE_CHECKING:
    from harness.report.runs import Machine

SIZES = ("randn", "outliers_1e2", "outliers_1e3", "outliers_1e4", "outliers_1e5")


@styled
def outliers(machine: Machine) -> list[Chart]:
    """SQNR of what is no outlier by how large the outliers are; a panel for each GEMM of a layer."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # role -> arm -> data -> dB
    for r in machine.rows:
        if r["suite"] == "outliers" and r["metric"] == "bulk_sqnr_db" and r["status"] == "ok":
            axes = text.axes_of(r["axes"])
            if axes.get("data") in SIZES and math.isfinite(r["value"]):
                series = found.setdefault(str(axes.get("role")), {}).setdefault(r["arm"], {})
                series[str(axes["data"])] = min(r["value"], series.get(str(axes["data"]), math.inf))
    if not found:
        return []
    page = sheet(f"outliers-{machine.env_id}", 3.3, len(found), sharey=True, grid="y")
    styles = {
        arm: look(machine, parse(arm)) | {"linestyle": "-", "linewidth": 1.1, "fillstyle": "none"}
        for arm in dict.fromkeys(arm for by_arm in found.values() for arm in by_arm)
    }
    for panel, (role, drawn) in zip(page.panels, found.items(), strict=True):
        for arm, values in drawn.items():
            where = [(SIZES.index(d), v) for d, v in values.items()]
            panel.plot(*zip(*sorted(where), strict=True), **styles[arm])
        panel.set_title(role)
        panel.set_xticks(range(len(SIZES)), ["none", "100x", "1e3x", "1e4x", "1e5x"])
        panel.set_xlabel("size of the outliers")
    page.axes.set_ylabel("SQNR of the rest (dB)")
    for arm, style in styles.items():
        page.axes.plot([], [], **style, label=arm)
    caption = (
        "Gaussian operands, one element in a thousand so many times as large. Shown is what becomes of the product of the "
        "others; the SQNR of the whole result stays high, since the outliers dominate it. Casts alone, summed in float64."
    )
    return [page.chart("What outliers do to the rest", caption)]
