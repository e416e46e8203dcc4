"""The oracles of the suites, against ml_dtypes and numpy; the layers of a model; the data."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8core.formats import as_element_format
from fp8core.recipe import MX_MODES, RECIPES, Cast
from fp8core.tensor import quantize
from harness.suites import common, oracle

# Models


# The oracle and the data


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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_lines_of_an_operand_are_cast_as_part_of_the_whole(recipe: str, dim: int) -> None:
    """The library's cast of the whole operand, of which the lines are taken."""
    x = torch.randn(192, 160) * 2.0 ** torch.randint(-6, 6, (192, 1) if dim else (1, 160))
    cast = RECIPES[recipe].output.a if dim else RECIPES[recipe].output.b
    assert cast is not None
    lines = torch.tensor([0, 5, 129, 150])
    codes, scale_inv = oracle.reference_operand(x, cast, dim, lines)
    whole = quantize(x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two)
    assert torch.equal(
        oracle.values(codes, scale_inv), whole.dequantize(torch.float64).index_select(1 - dim, lines)
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mode", MX_MODES)
def test_mx_rounding_modes_of_the_reference(mode: str, dtype: torch.dtype) -> None:
    """Two implementations that share no code; and no mode is another on the same data."""
    x = torch.randn(64, 96) * 2.0 ** torch.randint(-20, 20, (64, 1))
    x[0], x[1, :32], x[2, 0] = 0.0, 448.0, 2.0**-140
    lines = torch.arange(64)
    cast = Cast(as_element_format(dtype), "1x32", mx_mode=mode)
    codes, scale_inv = oracle.reference_operand(x, cast, 1, lines)
    whole = quantize(x, dtype, "1x32", dim=1, mx_mode=mode)
    assert torch.equal(oracle.values(codes, scale_inv), whole.dequantize(torch.float64))
    others = [quantize(x, dtype, "1x32", dim=1, mx_mode=other) for other in MX_MODES if other != mode]
    assert all(not torch.equal(other.scale_inv, whole.scale_inv) for other in others)


def test_rows_are_sampled_with_both_ends_and_the_same_for_one_seed() -> None:
    assert oracle.sample_rows(5, 0, 64, "cpu").tolist() == [0, 1, 2, 3, 4]
    rows = oracle.sample_rows(1000, 3, 64, "cpu")
    assert len(set(rows.tolist())) == len(rows) <= 64
    assert {0, 999} <= set(rows.tolist())
    assert rows.tolist() == oracle.sample_rows(1000, 3, 64, "cpu").tolist()
    assert rows.tolist() != oracle.sample_rows(1000, 4, 64, "cpu").tolist()


def test_the_distributions_are_what_they_say() -> None:
    def random() -> torch.Generator:
        return common.generator("cpu", 0, 0)

    n = 2**16
    assert common.draw("zeros", (n,), random()).abs().max() == 0
    assert common.draw("ones", (n,), random()).min() == 1
    uniform = common.draw("uniform", (n,), random(), torch.float32)
    assert -1 <= uniform.min() < -0.99 < 0.99 < uniform.max() < 1
    normal = common.draw("randn", (n,), random(), torch.float32)
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    outliers = common.draw("outlier_1e-3", (n,), random(), torch.float32)
    assert 30 < int((outliers != normal).sum()) < 110  # binomial, mean 65.5, sd 8.1
    assert torch.equal(outliers[outliers != normal], normal[outliers != normal] * 100)
    with pytest.raises(ValueError, match="randn, uniform"):
        common.draw("cauchy", (n,), random())


def test_rotating_operands_are_equal_copies_at_other_addresses() -> None:
    codes = torch.randn(8, 16).to(torch.float8_e4m3fn).t()
    grad = torch.randn(4, requires_grad=True)
    seen: list[tuple[Tensor, Tensor]] = []
    rotation = common.Rotation(lambda *x: seen.append(x), (codes, grad))
    assert len(rotation) == 16
    for closure in rotation:
        closure()
    assert len({x.data_ptr() for x, _ in seen} | {codes.data_ptr()}) == 17
    for x, y in seen:
        assert torch.equal(x.view(torch.uint8), codes.view(torch.uint8))
        assert x.stride() == codes.stride()
        assert torch.equal(y, grad)
        assert y.requires_grad
        assert y.is_leaf
    large = torch.empty(2**27, dtype=torch.uint8, device="meta")
    assert len(common.Rotation(lambda x: x, (large,))) == 3
