"""The oracles of the suites, against ml_dtypes and numpy; the layers of a model; the data."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8core.formats import E4M3FN, E5M2
from fp8core.recipe import MX_MODES, RECIPES, Cast
from harness.suites import common, oracle


@pytest.mark.parametrize(
    ("dtype", "other"), [("e4m3fn", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_the_reference_cast_against_ml_dtypes(dtype: str, other: Any) -> None:
    """All 65,536 bf16 patterns at scale 1 (amax = the largest value), ml_dtypes on the clipped input; 0 differ."""
    torch_dtype = getattr(torch, f"float8_{dtype}")
    top = float(torch.finfo(torch_dtype).max)
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    codes, scale_inv = oracle.reference_cast(x, torch_dtype, "tensorwise", amax=torch.tensor(top))
    assert scale_inv == 1
    nan = x.isnan().numpy()
    expected = np.clip(x.float().nan_to_num(0.0).numpy(), -top, top).astype(other).view(np.uint8)
    assert (codes.view(torch.uint8).numpy() == expected)[~nan].all()
    assert codes.float().isnan().numpy()[nan].all()


CASTS = {
    cast for recipe in RECIPES.values() for cast in (recipe.output.a, recipe.output.b) if cast is not None
}
MX = {Cast(fmt, "1x32", mx_mode=mode) for fmt in (E4M3FN, E5M2) for mode in MX_MODES}


def test_the_distributions_are_what_they_say() -> None:
    def drawn(data: str) -> Tensor:
        return common.draw(data, (2**16,), common.generator("cpu", 0, 0), torch.float32)

    assert drawn("zeros").abs().max() == 0
    assert drawn("ones").min() == drawn("ones").max() == 1
    assert -1 <= drawn("uniform").min() < -0.99 < 0.99 < drawn("uniform").max() < 1
    normal, outliers = drawn("randn"), drawn("outlier_1e-3")
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    assert 30 < int((outliers != normal).sum()) < 110  # binomial, mean 65.5, sd 8.1
    assert torch.equal(outliers[outliers != normal], normal[outliers != normal] * 100)
    with pytest.raises(ValueError, match="randn, uniform"):
        drawn("cauchy")
