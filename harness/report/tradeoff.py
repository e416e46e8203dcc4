"""Trade-off: what an arm gains set against what it loses, so that "fast but wrong" cannot hide; and where casts break."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.report.drawing import INK, LEAST_DB, Chart, ratio_axis, ratio_limits, sheet, span, styled
from harness.report.looks import look
from harness.report.numerics import SQNR
from harness.report.records import arm_records, newest
from harness.report.table import known
from harness.report.verdicts import WHAT
from harness.store import text
from harness.store.arm import Arm, arm_of, parse

if TYPE_CHECKING:
    from harness.report.runs import Machine

MOST_POINTS = 80  # of an arm
OUTLIERS = ("randn", "outliers_1e2", "outliers_1e3", "outliers_1e4", "outliers_1e5")


@styled
def speed_against_error(machine: Machine) -> list[Chart]:
    """Speedup over bf16 by the worst SQNR of a case's results; a figure a suite that has both."""
    charts = []
    for suite in [*WHAT, *(s for s in machine.suites if s not in WHAT)]:
        series: dict[str, list[tuple[float, float]]] = {}
        arms: dict[str, Arm] = {}
        for r in newest(arm_records(machine, suite)):
            found = [r[m] for m in SQNR if known(r.get(m)) and math.isfinite(r[m])]
            if found and known(r["speedup"]) and r["regime"] == "isolated" and _ran_fp8(r["flops"]):
                series.setdefault(r["arm"], []).append((min(found), r["speedup"]))
                arms[r["arm"]] = arm_of(r)
        if not series:
            continue
        modes = list(dict.fromkeys(arms[name].mode for name in series))
        page = sheet(f"tradeoff-{suite}-{machine.env_id}", 3.4, len(modes), sharex=True, sharey=True)
        ends = ratio_limits(gain for points in series.values() for _, gain in points)
        drawn: dict[str, dict[str, Any]] = {}
        for axes, mode in zip(page.panels, modes, strict=True):
            axes.axhline(1, color=INK, linewidth=0.9)
            for arm in (name for name in series if arms[name].mode == mode):
                step = max(1, -(-len(series[arm]) // MOST_POINTS))
                x, y = zip(*sorted(series[arm])[::step], strict=True)
                style = drawn[str(arms[arm].modeless)] = look(machine, arms[arm])
                axes.plot(x, y, **style)
            ratio_axis(axes.yaxis, log=axes.set_yscale)
            axes.set_ylim(*ends)
            axes.set_xlabel("worst SQNR of the case's results (dB)")
            axes.set_title(mode if len(modes) > 1 else "")
            axes.margins(x=0.06)
        span(page.axes, LEAST_DB)
        page.axes.set_ylabel("speedup over bf16")
        for name, style in drawn.items():
            page.axes.plot([], [], **style, label=text.short(name, 40))
        thinned = any(len(points) > MOST_POINTS for points in series.values())
        caption = "A mark a case, isolated regime; up is faster, right is more exact." + (
            f" At most {MOST_POINTS} marks an arm, spread by SQNR." if thinned else ""
        )
        charts.append(page.chart(f"Speed against error: {suite}", caption))
    return charts


@styled
def outliers(machine: Machine) -> list[Chart]:
    """SQNR of what is no outlier by how large the outliers are; a panel for each GEMM of a layer."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # role -> arm -> data -> dB
    for r in machine.rows:
        if r["suite"] == "outliers" and r["metric"] == "bulk_sqnr_db" and r["status"] == "ok":
            axes = text.axes_of(r["axes"])
            if axes.get("data") in OUTLIERS and math.isfinite(r["value"]):
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
            where = [(OUTLIERS.index(d), v) for d, v in values.items()]
            panel.plot(*zip(*sorted(where), strict=True), **styles[arm])
        panel.set_title(role)
        panel.set_xticks(range(len(OUTLIERS)), ["none", "100x", "1e3x", "1e4x", "1e5x"])
        panel.set_xlabel("size of the outliers")
    page.axes.set_ylabel("SQNR of the rest (dB)")
    for arm, style in styles.items():
        page.axes.plot([], [], **style, label=arm)
    caption = (
        "Gaussian operands, one element in a thousand so many times as large. Shown is what becomes of the product of the "
        "others; the SQNR of the whole result stays high, since the outliers dominate it. Casts alone, summed in float64."
    )
    return [page.chart("What outliers do to the rest", caption)]


def _ran_fp8(flops: str) -> bool:
    return '"e4m3' in flops or '"e5m2' in flops
