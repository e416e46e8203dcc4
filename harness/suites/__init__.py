"""The suites by name. To add one: its module in this folder, and its line in `SUITES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.suites import (
    accumulation,
    allgather,
    cast,
    ceilings,
    checksum,
    codes,
    divergence,
    gemm,
    linear,
    outliers,
    parallel,
    recipes,
    scale,
    smoke_kernels,
    smoke_layers,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.workload import Suite, TrialSuite

SUITES: Mapping[str, Suite | TrialSuite] = {
    "accumulation": accumulation,
    "allgather": allgather,
    "cast": cast,
    "ceilings": ceilings,
    "checksum": checksum,
    "codes": codes,
    "divergence": divergence,
    "gemm": gemm,
    "linear": linear,
    "outliers": outliers,
    "parallel": parallel,
    "recipes": recipes,
    "scale": scale,
    "smoke_kernels": smoke_kernels,
    "smoke_layers": smoke_layers,
    "train": train,
}
