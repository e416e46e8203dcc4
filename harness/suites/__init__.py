"""The suites by name. To add one: its module in this folder, and its line in `SUITES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.suites import (
    allgather,
    cast,
    ceilings,
    divergence,
    gemm,
    linear,
    outliers,
    parallel,
    recipes,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.workload import Suite, TrialSuite

SUITES: Mapping[str, Suite | TrialSuite] = {
    "allgather": allgather,
    "cast": cast,
    "ceilings": ceilings,
    "divergence": divergence,
    "gemm": gemm,
    "linear": linear,
    "outliers": outliers,
    "parallel": parallel,
    "recipes": recipes,
    "train": train,
}
