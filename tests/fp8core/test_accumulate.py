"""accumulate: each mode is told from the others, on all-positive operands, which is where a short register shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8core import E4M3FN, quantize, scaled_mm
from fp8core.gemm.accumulate import ACCUMULATIONS, accumulate

Measure = Callable[[torch.Tensor, torch.Tensor], float]


def codes(K: int, positive: bool, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A [size, K] and B [K, size] of e4m3 values in float64, scaled tensorwise."""
    generator = torch.Generator().manual_seed(K)
    a, b = (torch.randn(size, K, generator=generator) for _ in range(2))
    a, b = (a.abs(), b.abs()) if positive else (a, b)
    return quantize(a, E4M3FN).qdata.double(), quantize(b, E4M3FN).qdata.double().t()


def one_by_one(a: list[float], b: list[float], promote: bool) -> float:
    """The model in Python's own floats, for one output element."""
    import math

    def cut(x: float, step: float) -> float:
        return math.trunc(x / step) * step

    def bit(x: float) -> float:
        return 2.0 ** (math.frexp(x)[1] - 1 - 13) if x else 1.0

    register, total = 0.0, 0.0
    for start in range(0, len(a), 32):
        products = [x * y for x, y in zip(a[start : start + 32], b[start : start + 32], strict=True)]
        step = bit(max(abs(v) for v in [*products, register]))
        register = sum(cut(v, step) for v in products) + cut(register, step)
        register = cut(register, bit(register))
        if promote and (start + 32) % 128 == 0:
            total, register = float(torch.tensor(total + register)), 0.0
    return float(torch.tensor(total + register))


@pytest.mark.parametrize("K", [1, 31, 128, 300, 512])
@pytest.mark.parametrize("mode", ["fp22", "fp22_promote128"])
def test_against_the_model_in_plain_python(mode: str, K: int) -> None:
    """Oracle: the definition, element by element."""
    for positive in (False, True):
        a, b = codes(K, positive, size=3)
        got = accumulate(a, b, mode)
        for i in range(3):
            for j in range(3):
                assert got[i, j] == one_by_one(a[i].tolist(), b[:, j].tolist(), mode == "fp22_promote128")


@pytest.mark.parametrize(
    "granularities", [("tensorwise",) * 2, ("rowwise",) * 2, ("1x128", "128x128"), ("1x32",) * 2]
)
def test_scaled_mm_takes_a_mode(granularities: tuple[str, str], sqnr_db: Measure) -> None:
    """Oracle: the mode's own accuracy, through scales of every kind."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(32, 1024, generator=generator) for _ in range(2))
    qa = quantize(a, E4M3FN, granularities[0], dim=1)
    qb = quantize(b.t(), E4M3FN, granularities[1], dim=0)
    exact = scaled_mm(qa, qb, torch.float64, backend="reference")
    found = {
        mode: sqnr_db(exact, scaled_mm(qa, qb, torch.float32, backend="reference", accumulation=mode))
        for mode in ACCUMULATIONS
    }
    assert found["exact"] > 120
    assert found["fp22_promote128"] > 55
    # Blocks of 128 are scaled, and so promoted, one by one: there is nothing left to lose
    assert (found["fp22"] < 50) == (granularities[0] != "1x128")


def test_bad_modes() -> None:
    a, b = codes(32, positive=False)
    with pytest.raises(ValueError, match="'fp32' is unknown"):
        accumulate(a, b, "fp32")
