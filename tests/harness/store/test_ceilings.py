"""Ceilings from stored rows. Oracle: rows written with times that follow from chosen rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from report_fixtures import frame
from stored import row

from harness.machine.ceilings import ceilings
from harness.store.case import Case

if TYPE_CHECKING:
    from pathlib import Path

    from harness.store.measurement import Measurement


def time(suite: str, axes: dict[str, object], ms: float, arm: str = "torch", **more: object) -> Measurement:
    case = Case.of(suite, axes)
    return row(case, arm, [ms], **more)


def test_gemms_by_role_the_forward_one_with_fast_accumulation(tmp_path: Path) -> None:
    sizes = {"M": 512, "K": 256, "N": 128}
    rows = [
        time("gemm", {**sizes, "role": "output"}, 1.0, "tensorwise_eager"),
        time("gemm", {**sizes, "role": "output"}, 0.9, "tensorwise_fast_eager"),
        time("gemm", {**sizes, "role": "grad_input"}, 1.0, "tensorwise_eager"),
        time("gemm", {**sizes, "role": "grad_input"}, 0.9, "tensorwise_fast_eager"),
        time("gemm", {**sizes, "role": "output", "data": "zeros"}, 0.5, "bf16"),
        time("gemm", {**sizes, "role": "output"}, 0.4, "rowwise_triton_eager"),
    ]
    found = ceilings(frame(tmp_path, rows))
    assert found is not None
    times = {(p.kind, p.role): p.seconds for p in found.products}
    assert times == {
        ("tensorwise_eager", "output"): pytest.approx(0.9e-3),
        ("tensorwise_eager", "grad_input"): pytest.approx(1.0e-3),
    }, "zeros flatter, and a kernel of ours is not the library's"
