"""What a layer would gain if casting were free: its three products alone, on operands that are already cast.

The suite `gemm` times single products of given sizes without their casts. A layer of M tokens, K inputs and N outputs
has three of them; where all three were measured on the same machine, their bf16 time over their FP8 time stands beside
the ratio of the layer, which holds the casts. The difference is what casting costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.records import arm_records, newest
from harness.report.runs import once
from harness.report.table import Cell, known
from harness.store import text
from harness.store.arm import arm_of
from harness.store.compare import SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine
    from harness.report.table import Record

LAYERS, PRODUCTS = "linear", "gemm"  # suites
FIELD = "products_alone"
DUE = "products_due"  # of arms in FP8: the column is shown even where no product was measured
# Recipes whose products are another's: (recipe, role) -> arm of suite gemm; scales are made outside the product.
SAME_PRODUCT = {"delayed": "tensorwise", "static": "tensorwise", "rowwise_with_gw_hp": "rowwise"}
IN_BF16 = {("rowwise_with_gw_hp", "grad_weight")}
BASE = "bf16"
MISSING = "not measured"
WAY = "python -m harness sweep=gemm, of the same sizes"

Sizes = tuple[int, int, int, str]  # M, K, N and role of a product


def added(machine: Machine, records: Sequence[Record]) -> list[Record]:
    """Records of layers with `FIELD`: the ratio, NaN where a product of that size was not measured; none for bf16."""
    ratios = [_ratio(machine, r) for r in records]
    return [
        {**r, FIELD: ratio, DUE: True if ratio is not None else None}
        for r, ratio in zip(records, ratios, strict=True)
    ]


def cell(record: Record) -> Cell:
    """The ratio of the products alone; where it is missing, the sweep that measures it."""
    ratio = record.get(FIELD)
    if ratio is None:
        return Cell("", None)
    return Cell(text.ratio(ratio), ratio) if known(ratio) else Cell(MISSING, None, "muted", WAY)


def _ratio(machine: Machine, record: Record) -> float | None:
    """bf16 time over FP8 time of the three products, NaN where one is missing, None where there is no FP8."""
    arm = arm_of(record)
    if not arm.has_fp8 or record["status"] != "ok":
        return None
    axes = text.axes_of(record["axes"])
    sizes = [axes.get(name) for name in text.SIZES]
    if not all(isinstance(size, int) for size in sizes):
        return float("nan")
    m, k, n = (int(str(size)) for size in sizes)
    times = _times(machine)
    bf16 = fp8 = 0.0
    for size in ((m, k, n, "output"), (m, n, k, "grad_input"), (n, m, k, "grad_weight")):
        recipe = BASE if (arm.recipe, size[3]) in IN_BF16 else SAME_PRODUCT.get(arm.recipe, arm.recipe)
        bf16 += times.get((size, BASE, record["regime"] or ""), float("nan"))
        fp8 += times.get((size, recipe, record["regime"] or ""), float("nan"))
    return bf16 / fp8


@once
def _times(machine: Machine) -> dict[tuple[Sizes, str, str], float]:
    """Median seconds of each product, by size, "bf16" or recipe, and regime; the library's own product alone."""
    found: dict[tuple[Sizes, str, str], float] = {}
    for r in newest(arm_records(machine, PRODUCTS)):
        arm = arm_of(r)
        axes: dict[str, Any] = dict(text.axes_of(r["axes"]))
        what = "" if arm.variant or arm.peer else arm.recipe
        if r["status"] == "ok" and what and {"M", "K", "N", "role"} <= axes.keys():
            size = (axes["M"], axes["K"], axes["N"], axes["role"])
            found[size, what, r["regime"] or ""] = r["value"] * SECONDS[r["unit"]]
    return found
