"""Packages that a row is of. Oracle: who registered what, planted here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fp8core.extensions import Extension
from fp8core.gemm import BACKENDS
from fp8core.recipe import RECIPES
from harness.store.case import Arm, Case
from harness.suites import extended


@pytest.mark.parametrize(
    ("arm", "packages"), [(Arm("rowwise"), {"other": "1.2"}), (Arm("base"), {}), (Arm("unheard"), {})]
)
def test_the_backend_of_an_arms_recipe_counts_though_nothing_resolved_it(
    arm: Arm, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that failed before it ran has no `resolved`; what was to run is that of another package all the same."""
    planted = Extension("backends", "torch", "other", "1.2", "other:BACKEND", SimpleNamespace)
    assert RECIPES["rowwise"].backend == "torch"
    monkeypatch.setattr(
        type(BACKENDS),
        "owner",
        lambda table, name: planted if table is BACKENDS and name == "torch" else None,
    )
    assert extended.used(Case.of("linear", {}), arm, {}) == packages
