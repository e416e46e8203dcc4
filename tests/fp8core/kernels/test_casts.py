"""Casts: every operator's kernel gives the bytes of the plain reference, at every shape and for every special value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.kernels import ops, reference

Compare = Callable[[Any, Any], None]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
POWERS = pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])
GROUPED = (
    "cast_rowwise",
    "cast_rowwise_both",
    "cast_1x128",
    "cast_1x128_both",
    "cast_128x128_both",
)
SHAPES = [(1, 1), (16, 48), (17, 63), (1, 130), (132, 131)]  # the last: two tiles each way, one ragged


def check(name: str, compare: Compare, device: torch.device, x: torch.Tensor, *args: Any) -> None:
    """Operator against reference, on the same arguments."""
    moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    got = getattr(ops, name)(x.to(device), *moved)
    compare(tuple(got) if isinstance(got, (tuple, list)) else got, getattr(reference, name)(x, *args))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amax(shape: tuple[int, int], device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference. Odd shapes in each dtype, with the largest magnitude negative and last."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(shape).to(dtype)
        x[-1, -1] = -9.0
        check("amax", same_bytes, device, x)
        check("amax_rows_cols", same_bytes, device, x)


@pytest.mark.parametrize("special", [0.0, float("inf"), float("-inf"), float("nan"), 1e-40])
def test_amax_of_special_values(special: float, device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference. NaN beats Inf beats all; a subnormal is not flushed to 0."""
    x = torch.zeros(33, 70)
    x[5, 68] = special
    check("amax", same_bytes, device, x)
    check("amax_rows_cols", same_bytes, device, x)
    x[20, 1] = float("inf")
    check("amax", same_bytes, device, x)


@DTYPES
@POWERS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensorwise(
    shape: tuple[int, int], power_of_two: bool, dtype: torch.dtype, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: reference. Both layouts; also with an amax that is not x's own, so that values saturate."""
    x = torch.randn(shape).bfloat16()
    for amax in (reference.amax(x), torch.tensor(0.3)):
        check("cast", same_bytes, device, x, amax, dtype, power_of_two)
        check("cast_both", same_bytes, device, x, amax, dtype, power_of_two)


@DTYPES
@POWERS
@pytest.mark.parametrize("shape", SHAPES[2::2], ids=str)
def test_delayed(
    shape: tuple[int, int], power_of_two: bool, dtype: torch.dtype, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: reference. The amax is an earlier step's, and this one's is found in passing."""
    x = torch.randn(shape).bfloat16()
    settings = (300.0, 2), (3.0, -1), (1.0, 0), (0.0, 0), (float("inf"), 0), (float("nan"), 0)
    for amax, margin in settings if shape == SHAPES[2] else settings[:2]:
        args = (torch.tensor(amax), dtype, power_of_two, margin)
        check("cast_delayed", same_bytes, device, x, *args)
        check("cast_delayed_both", same_bytes, device, x, *args)


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [(0, 0), (131, 130)], ids=str)
def test_delayed_hides_no_infinity(
    where: tuple[int, int], special: float, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: reference: scale_inv is NaN, whichever program met the value."""
    x = torch.randn(132, 131)
    x[where] = special
    for name in ("cast_delayed", "cast_delayed_both"):
        check(name, same_bytes, device, x, torch.tensor(2.0), E4M3, False, 0)
        assert getattr(reference, name)(x, torch.tensor(2.0), E4M3, False, 0)[-2].isnan()


@DTYPES
@POWERS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_grouped(
    name: str,
    shape: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
    device: torch.device,
    same_bytes: Compare,
) -> None:
    """Oracle: reference. Rows of very different size, so that a scale from the wrong group shows."""
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).bfloat16()
    check(name, same_bytes, device, x, dtype, power_of_two)


@pytest.mark.parametrize(("dtype", "power_of_two"), [(E4M3, False), (E5M2, True)], ids=["e4m3", "e5m2"])
def test_every_bfloat16(
    power_of_two: bool,
    dtype: torch.dtype,
    all_bf16: torch.Tensor,
    finite_bf16: torch.Tensor,
    device: torch.device,
    same_bytes: Compare,
) -> None:
    """Oracle: reference. All 65,536 patterns, with groups that hold NaN or Inf and with finite ones only."""
    one = torch.tensor(1.0)
    for x in (all_bf16, finite_bf16):
        check("cast_both", same_bytes, device, x, one, dtype, power_of_two)
        for name in ("cast_rowwise_both", "cast_1x128_both", "cast_128x128_both"):
            check(name, same_bytes, device, x, dtype, power_of_two)
    check("cast_both", same_bytes, device, all_bf16, reference.amax(all_bf16), dtype, power_of_two)


@pytest.mark.parametrize("source", [torch.float16, torch.float32])
def test_other_input_dtypes(source: torch.dtype, device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference. Float32 holds values that bfloat16 lacks, ties of the format among them."""
    x = (torch.randn(64, 144) * 4).to(source)
    x[:, 0] = 448.0
    x[3, 5:8] = torch.tensor([17.0, 19.0, 2.0**-10]).to(source)
    check("cast_both", same_bytes, device, x, reference.amax(x), E4M3, False)
    for name in GROUPED:
        check(name, same_bytes, device, x, E4M3, False)


@pytest.mark.parametrize("name", ["cast_both", *GROUPED])
@pytest.mark.parametrize("value", [0.0, 1e-40, float("inf"), float("nan")])
def test_group_of_special_values(name: str, value: float, device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference. A whole tensor and one element of the value; NaN must spread over its group and no further."""
    full, single = torch.full((40, 150), value), torch.randn(40, 150)
    single[7, 141] = value
    for x in (full, single):
        args = (reference.amax(x), E4M3, False) if name == "cast_both" else (E4M3, False)
        check(name, same_bytes, device, x, *args)


def test_rows_longer_than_one_block(device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference. A row of more columns than a program holds is read twice."""
    x = torch.randn(2, 16384 + 300).bfloat16()
    x[1, -1] = 50.0
    check("cast_rowwise", same_bytes, device, x, E4M3, False)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_layouts(layout: str, device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference on a row-major copy. Inputs in any layout, outputs row-major."""
    x = {
        "transposed": lambda: torch.randn(48, 33).t(),
        "expanded": lambda: torch.randn(1, 48).expand(33, 48),
        "sliced": lambda: torch.randn(70, 100)[3:36, 5:53],
    }[layout]()
    assert not x.is_contiguous()
    for name in ("cast_rowwise_both", "cast_1x128_both"):
        got = getattr(ops, name)(x.to(device), E4M3, False)
        same_bytes(tuple(got), getattr(reference, name)(x.contiguous(), E4M3, False))


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)], ids=str)
def test_empty(shape: tuple[int, int], device: torch.device, same_bytes: Compare) -> None:
    """Oracle: reference, to which empty inputs go."""
    x = torch.empty(shape)
    check("amax", same_bytes, device, x)
    check("cast_both", same_bytes, device, x, torch.tensor(0.0), E4M3, False)
    for name in GROUPED:
        check(name, same_bytes, device, x, E4M3, False)
