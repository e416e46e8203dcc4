"""Ceilings from stored rows. Oracle: rows written with times that follow from chosen rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from report_fixtures import frame
from stored import row

from harness.machine.ceilings import ceilings
from harness.store.case import Case
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from pathlib import Path


def time(suite: str, axes: dict[str, object], ms: float, arm: str = "torch", **more: object) -> Measurement:
    case = Case.of(suite, axes)
    return row(case, arm, [ms], **more)


def test_products_moves_and_launches(tmp_path: Path) -> None:
    """1024^3 in 1 ms is 2.147 TFLOP/s; 2 MiB in 1 ms are 2.097 GB/s; 1000 launches are stored as us of one."""
    rows = [
        time("ceilings", {"what": "mm_bf16", "cube": 1024}, 1.0),
        time("ceilings", {"what": "mm_fp8_tensorwise", "cube": 1024}, 0.5),
        time("ceilings", {"what": "copy", "mib": 1}, 1.0, bytes_moved=2.0 * 2**20),
        time("ceilings", {"what": "copy", "mib": 64}, 16.0, bytes_moved=128.0 * 2**20),
        time("ceilings", {"what": "launch"}, 3.5, metric="launch_us", regime="isolated"),
    ]
    found = ceilings(frame(tmp_path, rows))
    assert found is not None
    assert found.achieved == {
        "bf16": pytest.approx(2 * 1024**3 / 1e-3 / 1e12),
        "fp8": pytest.approx(4.294967296),
    }
    assert found.launch_s == pytest.approx(3.5e-6)
    assert found.bandwidth(2.0 * 2**20) == pytest.approx(2.0 * 2**20 / 1e-3)
    assert found.bandwidth(128.0 * 2**20) == pytest.approx(128 * 2**20 / 16e-3)
    middle = found.bandwidth(16.0 * 2**20)  # halfway in the logarithm
    assert middle == pytest.approx((2.0 * 2**20 / 1e-3 + 128 * 2**20 / 16e-3) / 2, rel=1e-6)
    assert found.bandwidth(1.0) == found.bandwidth(2.0 * 2**20), "no further than was measured"
    assert found.bandwidth(1.0, "transpose") is None


def test_sustained_load_stands_where_it_was_measured(tmp_path: Path) -> None:
    axes = {"what": "mm_bf16", "cube": 1024}
    rows = [time("ceilings", axes, 1.0), time("ceilings", axes, 1.2, regime="sustained")]
    found = ceilings(frame(tmp_path, rows))
    assert found is not None
    assert [product.seconds for product in found.products] == [pytest.approx(1.2e-3)]


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
