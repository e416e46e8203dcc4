"""Oracles: numpy in float64, written from the definitions in METRICS; codes counted by hand."""

from __future__ import annotations

import pytest
import torch

from harness.timing import metrics

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF = float("inf")


def rows(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("factor", [2.0**-500, 2.0**-30, 2.0**500])
def test_sqnr_does_not_depend_on_the_unit(factor: float) -> None:
    """Powers of two change no rounding, so the figure stays bit for bit, also where squares would underflow."""
    reference, actual = rows((8, 9), 1), rows((8, 9), 2)
    assert metrics.sqnr_db(actual * factor, reference * factor) == metrics.sqnr_db(actual, reference)


def test_empty_and_mismatched_shapes_are_refused() -> None:
    for figure in (metrics.sqnr_db, metrics.sqnr_row_min_db, metrics.rel_err_max, metrics.underflow_frac):
        with pytest.raises(ValueError, match="empty tensor"):
            figure(torch.empty(0, 3), torch.empty(0, 3))
        with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
            figure(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="empty tensor"):
        metrics.saturated_frac(torch.empty(0), 464.0)
