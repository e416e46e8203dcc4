"""Numerical figures of a result: pure functions of tensors that return one float.

Names, units and directions stand in `harness.store.measurement.METRICS`. Tensors of any floating dtype, float8
included, are compared in float64. Every function refuses an empty tensor: there is nothing to state about it.

Special values, the same for all: an exact result has an SQNR of inf and an error of 0, whatever the reference
is; a wrong result against an all-zero reference has an SQNR of -inf and an error of inf; a NaN on either side
makes the figure NaN, which no bound of a suite accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sqnr_db(actual: Tensor, reference: Tensor) -> float:
    """Signal-to-quantisation-noise ratio of the whole result: 20 log10(|ref| / |ref - x|) in dB.

    >>> sqnr_db(torch.tensor([1.1, 0.0]), torch.tensor([1.0, 0.0]))  # doctest: +ELLIPSIS
    19.99...
    """
    actual, reference = _pair(actual, reference)
    return float(_sqnr(actual.reshape(1, -1), reference.reshape(1, -1)))


def sqnr_row_min_db(actual: Tensor, reference: Tensor) -> float:
    """Smallest SQNR of any row, in dB; a row runs along the last dimension.

    A figure over the whole result is dominated by its largest rows and hides a destroyed small one.
    """
    actual, reference = _pair(actual, reference)
    rows = _sqnr(actual.reshape(-1, actual.shape[-1]), reference.reshape(-1, reference.shape[-1]))
    return float("nan") if bool(rows.isnan().any()) else float(rows.min())


def rel_err_max(actual: Tensor, reference: Tensor) -> float:
    """Largest |x - ref| over the largest |ref|."""
    actual, reference = _pair(actual, reference)
    error, size = float((actual - reference).abs().max()), float(reference.abs().max())
    if error == 0.0:
        return 0.0
    return error / size if size else error * float("inf")


def figures(actual: Tensor, reference: Tensor) -> dict[str, float]:
    """The three figures of any result against its reference, by metric name; rows along the last dimension."""
    return {
        "sqnr_db": sqnr_db(actual, reference),
        "sqnr_row_min_db": sqnr_row_min_db(actual, reference),
        "rel_err_max": rel_err_max(actual, reference),
    }


def underflow_frac(quantised: Tensor, source: Tensor) -> float:
    """Share of the nonzero elements of `source` that became zero; 0 where there is none."""
    if quantised.shape != source.shape:
        raise ValueError(f"shapes differ: {tuple(quantised.shape)} and {tuple(source.shape)}")
    _refuse_empty(source)
    nonzero = source != 0
    count = int(nonzero.sum())
    # float32 first: not every device compares float8.
    return int(((quantised.float() == 0) & nonzero).sum()) / count if count else 0.0


def saturated_frac(scaled: Tensor, overflow: float) -> float:
    """Share of elements that only the clamp keeps finite.

    Args:
        scaled: input times scale, before clamp and rounding.
        overflow: the magnitude from which round-to-nearest leaves the format (464 for e4m3fn, which itself
            still ties to 448; 61440 for e5m2). Anything between the largest value and it rounds to the
            largest value by plain rounding, such as the amax that a float32 product puts 1 ulp above 448.
    """
    _refuse_empty(scaled)
    return int((scaled.abs() > overflow).sum()) / scaled.numel()


def mismatches(actual: Tensor, reference: Tensor) -> float:
    """Number of float8 elements whose codes differ; all NaN codes are one class, +0 and -0 are not.

    Args:
        actual: float8 tensor.
        reference: float8 tensor of the same dtype and shape.
    """
    if actual.dtype != reference.dtype or actual.element_size() != 1 or not actual.is_floating_point():
        raise TypeError(
            f"mismatches compares two float8 tensors of one dtype, got {actual.dtype}, {reference.dtype}"
        )
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(reference.shape)}")
    _refuse_empty(actual)
    codes = actual.view(torch.uint8) != reference.view(torch.uint8)
    both_nan = actual.float().isnan() & reference.float().isnan()
    return float((codes & ~both_nan).sum())


def _sqnr(actual: Tensor, reference: Tensor) -> Tensor:
    """SQNR in dB along the last dimension of two float64 matrices."""
    # The largest magnitude is divided out first: squares of small gradients would leave even float64.
    size = reference.abs().amax(dim=-1, keepdim=True)
    unit = torch.where(size > 0, size, torch.ones_like(size))
    signal = (reference / unit).norm(dim=-1)
    noise = ((actual - reference) / unit).norm(dim=-1)
    ratio = torch.where(noise == 0, torch.full_like(noise, float("inf")), signal / noise)
    return 20 * ratio.log10()


def _pair(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(reference.shape)}")
    _refuse_empty(actual)
    return actual.detach().double(), reference.detach().double()


def _refuse_empty(x: Tensor) -> None:
    if x.numel() == 0:
        raise ValueError(f"no figure can be stated about an empty tensor of shape {tuple(x.shape)}")
