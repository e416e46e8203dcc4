"""The oracles of the suites, against ml_dtypes and numpy; the layers of a model; the data."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("granularity", ["1x128", "128x128", "1x32"])
def test_the_amax_of_blocks_against_a_loop(granularity: str, dim: int) -> None:
    """Element by element with numpy, on a matrix that the blocks do not divide."""
    x = torch.randn(150, 270) * 2.0 ** torch.randint(-20, 20, (150, 270))
    across, along = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}[granularity]
    height, width = (across, along) if dim == 1 else (along, across)
    magnitude = x.abs().numpy()
    expected = np.empty_like(magnitude)
    for i in range(0, 150, height):
        for j in range(0, 270, width):
            block = magnitude[i : i + height, j : j + width]
            expected[i : i + height, j : j + width] = block.max()
    assert np.array_equal(oracle.group_amax(x, granularity, dim).numpy(), expected)
    assert np.array_equal(oracle.group_amax(x, granularity, dim - 2).numpy(), expected)


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


def test_rotating_operands_differ_in_contents_and_in_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the sorted bytes of the operands; every set is another order of the same elements at another address. One in a
    hundred pairs of beginnings would meet in many sets: these are drawn alike each time."""
    monkeypatch.setattr(common, "_chance", random.Random(0))
    codes = torch.randn(64, 48).to(torch.float8_e4m3fn).t()
    grad = torch.randn(512, requires_grad=True)
    for apart in (0, 16):
        seen: list[tuple[Tensor, Tensor]] = []
        rotation = common.Rotation(lambda *x, seen=seen: seen.append(x), (codes, grad), lambda *_: "", apart)
        for _ in range(2):
            rotation.begin(16)
            for _ in range(16):
                rotation()
                x, y = seen[-1]
                assert (x.stride(), x.dtype, y.is_leaf, y.requires_grad) == (
                    codes.stride(),
                    codes.dtype,
                    True,
                    True,
                )
                seen[-1] = x.view(torch.uint8).t().flatten().clone(), y.detach().clone()
                assert torch.equal(seen[-1][0].sort().values, codes.view(torch.uint8).flatten().sort().values)
                assert torch.equal(y.detach().sort().values, grad.detach().sort().values)
        for part in (0, 1):
            assert len({bytes(one[part].view(torch.uint8).numpy()) for one in seen}) >= (
                16 if part else 30
            ), apart
    large = torch.empty(2**27, dtype=torch.uint8, device="meta")
    assert len(common.Rotation(lambda x: x, (large,), lambda *_: "", 16)) == 3
