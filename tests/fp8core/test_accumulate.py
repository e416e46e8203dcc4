"""accumulate: each mode is told from the others, on all-positive operands, which is where a short register shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8core import E4M3FN, quantize, scaled_mm
from fp8core.gemm.accumulate import ACCUMULATIONS

Measure = Callable[[torch.Tensor, torch.Tensor], float]


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
