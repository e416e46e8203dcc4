"""The suites by name. To add one: its module in this folder, and its line in `SUITES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.suites import cast, ceilings, gemm, linear, outliers, recipes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.workload import Suite

SUITES: Mapping[str, Suite] = {
    "cast": cast,
    "ceilings": ceilings,
    "gemm": gemm,
    "linear": linear,
    "outliers": outliers,
    "recipes": recipes,
}
