"""Suite `accumulation`. Oracle: products summed on purpose in each of the ways that it tells apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.gemm.accumulate import ACCUMULATIONS, accumulate
from harness.store.case import Case
from harness.suites import accumulation


def case(K: int = 2048, data: str = "positive") -> Case:
    return Case.of("accumulation", {"K": K, "data": data})


@pytest.mark.parametrize("data", ["positive", "randn"])
@pytest.mark.parametrize("mode", ACCUMULATIONS)
def test_it_names_the_sum_that_was_formed(mode: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(a: Any, b: Any, *_: object, **__: object) -> torch.Tensor:
        codes = accumulate(a.qdata.double(), b.qdata.double(), mode)
        return (codes * a.scale_inv.double() * b.scale_inv.double()).float()

    monkeypatch.setattr(accumulation, "scaled_mm", summed)
    work = accumulation.build(case(data=data), "slow", "cpu")
    numerics = work.check()
    assert numerics.ok, numerics.reason
    assert work.resolved["agrees_best_with"] == mode
    assert numerics.values[accumulation.FIGURES[mode]] > 120


def test_a_cpu_sums_in_float32() -> None:
    """torch 2.13 multiplies dequantised operands: 24 bits leave more than 120 dB, whatever the signs."""
    for arm in ("reference", "slow"):
        numerics = accumulation.build(case(), arm, "cpu").check()
        assert numerics.ok
        assert numerics.values["accum_sqnr_db"] > 120


def test_a_sum_that_no_register_explains_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of K forgotten."""

    def half(a: Any, b: Any, *_: object, **__: object) -> torch.Tensor:
        kept = a.qdata.shape[1] // 2
        return (a.qdata.double()[:, :kept] @ b.qdata.double()[:kept] * a.scale_inv * b.scale_inv).float()

    monkeypatch.setattr(accumulation, "scaled_mm", half)
    numerics = accumulation.build(case(), "slow", "cpu").check()
    assert not numerics.ok
    assert "short accumulator" in numerics.reason


@pytest.mark.parametrize(
    ("arm", "of", "kind"),
    [
        ("slow", {"K": 100}, "shape"),
        ("fast", {}, "device"),
        ("triton_slow", {}, "device"),
        ("triton_fast", {}, "device"),
    ],
)
def test_what_cannot_run_here_says_why(arm: str, of: dict[str, Any], kind: str) -> None:
    why = accumulation.unsupported(case(**of), arm, "cpu")
    assert why is not None
    assert why.kind == kind
    assert why.reason
    with pytest.raises(ValueError, match=r"axes\.K"):
        accumulation.points(["llama"], {}, None)
