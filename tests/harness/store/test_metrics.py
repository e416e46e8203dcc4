"""Oracles: numpy in float64, written from the definitions in METRICS; codes counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.timing import metrics

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF = float("inf")


def rows(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(1,), (7, 13), (16, 16), (2, 3, 5), (63, 1), (1, 17)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sqnr_and_error_against_numpy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference, actual = rows(shape, 1, dtype), rows(shape, 2, dtype)
    r, a = reference.double().numpy(), actual.double().numpy()
    expected = 20 * np.log10(np.linalg.norm(r) / np.linalg.norm(r - a))
    assert metrics.sqnr_db(actual, reference) == pytest.approx(expected, rel=1e-12)
    by_row = 20 * np.log10(np.linalg.norm(r, axis=-1) / np.linalg.norm(r - a, axis=-1))
    assert metrics.sqnr_row_min_db(actual, reference) == pytest.approx(by_row.min(), rel=1e-12)
    assert metrics.rel_err_max(actual, reference) == pytest.approx(
        np.abs(a - r).max() / np.abs(r).max(), rel=1e-12
    )


@pytest.mark.parametrize("factor", [2.0**-500, 2.0**-30, 2.0**500])
def test_sqnr_does_not_depend_on_the_unit(factor: float) -> None:
    """Powers of two change no rounding, so the figure stays bit for bit, also where squares would underflow."""
    reference, actual = rows((8, 9), 1), rows((8, 9), 2)
    assert metrics.sqnr_db(actual * factor, reference * factor) == metrics.sqnr_db(actual, reference)


def test_exact_results_and_zero_references() -> None:
    x, zero = rows((3, 4)), torch.zeros(3, 4)
    for same in (x, zero):
        assert metrics.sqnr_db(same, same) == INF
        assert metrics.sqnr_row_min_db(same, same) == INF
        assert metrics.rel_err_max(same, same) == 0.0
    assert metrics.sqnr_db(x, zero.double()) == -INF
    assert metrics.sqnr_row_min_db(x, zero.double()) == -INF
    assert metrics.rel_err_max(x, zero.double()) == INF


def test_empty_and_mismatched_shapes_are_refused() -> None:
    for figure in (metrics.sqnr_db, metrics.sqnr_row_min_db, metrics.rel_err_max, metrics.underflow_frac):
        with pytest.raises(ValueError, match="empty tensor"):
            figure(torch.empty(0, 3), torch.empty(0, 3))
        with pytest.raises(ValueError, match=r"\(2, 3\) and \(3, 2\)"):
            figure(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="empty tensor"):
        metrics.saturated_frac(torch.empty(0), 464.0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_mismatches_over_all_pairs_of_codes(dtype: torch.dtype) -> None:
    """Exhaustive: 65,536 pairs of codes against a comparison in numpy on the bytes and the decoded values."""
    codes = torch.arange(256, dtype=torch.uint8)
    left, right = codes.repeat_interleave(256), codes.repeat(256)
    nan = codes.view(dtype).float().isnan().numpy()
    a, b = left.numpy(), right.numpy()
    expected = int(((a != b) & ~(nan[a] & nan[b])).sum())
    assert metrics.mismatches(left.view(dtype), right.view(dtype)) == expected
    assert metrics.mismatches(left.view(dtype), left.view(dtype)) == 0
