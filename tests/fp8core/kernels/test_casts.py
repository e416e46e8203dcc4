"""Casts: every operator's kernel gives the bytes of the plain reference, at every shape and for every special value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hard_inputs import hard_inputs

from fp8core.kernels import ops, reference
from fp8core.scaling import MX_MODES

Compare = Callable[[Any, Any], None]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((1, 1), (16, 48), (17, 63), (1, 130), (132, 131))  # the last: two tiles each way, one ragged
DELAYED = ((300.0, 2), (3.0, -1), (1.0, 0), (0.0, 0), (float("inf"), 0), (float("nan"), 0))  # amax, margin
OPERATORS = [name for name in ops.OPERATORS if name.startswith(("amax", "cast"))]


def arguments(name: str, x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> list[tuple[Any, ...]]:
    """After x. Tensorwise also an amax that is not x's own, so that values saturate; delayed, an earlier step's."""
    if name.startswith("amax"):
        return [()]
    if "mx" in name:
        return [(dtype, "even" if power_of_two else "rceil")]  # the modes differ in a scale alone, see below
    if "delayed" in name:
        return [(torch.tensor(amax), dtype, power_of_two, margin) for amax, margin in DELAYED]
    if name in ("cast", "cast_both"):
        return [(amax, dtype, power_of_two) for amax in (reference.amax(x), torch.tensor(0.3))]
    return [(dtype, power_of_two)]


def shapes() -> Iterator[torch.Tensor]:
    """Rows of very different size, so that a scale from the wrong group shows; the largest magnitude negative and last."""
    for shape in SHAPES:
        x = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
        x[-1, -1] = -x.abs().max()
        yield x.bfloat16()


def other_dtypes() -> Iterator[torch.Tensor]:
    """Float32 holds values that bfloat16 lacks, ties of the format among them."""
    for dtype in (torch.float16, torch.float32):
        x = (torch.randn(64, 144) * 4).to(dtype)
        x[:, 0] = 448.0
        x[3, 5:8] = torch.tensor([17.0, 19.0, 2.0**-10]).to(dtype)
        yield x


def special_values() -> Iterator[torch.Tensor]:
    """NaN spreads over its group and no further, and beats Inf; no infinity is hidden, whichever program meets it."""
    for value in (0.0, 1e-40, float("inf"), float("-inf"), float("nan")):
        yield torch.full((40, 150), value)
        for where in ((0, 0), (39, 149)):
            x = torch.randn(40, 150)
            x[where] = value
            yield x
    x[20, 1] = float("inf")
    yield x


def every_bfloat16() -> Iterator[torch.Tensor]:
    """Groups that hold NaN or Inf, and finite ones only."""
    x = hard_inputs()["bf16"].view(256, 256)
    yield from (x, torch.where(x.isfinite(), x, 0))


def layouts() -> Iterator[torch.Tensor]:
    yield from (torch.randn(48, 33).t(), torch.randn(1, 48).expand(33, 48), torch.randn(70, 100)[3:36, 5:53])


def long_and_empty() -> Iterator[torch.Tensor]:
    """A row of more columns than a program holds is read twice; the reference takes what is empty."""
    x = torch.randn(2, 16384 + 300).bfloat16()
    x[1, -1] = 50.0
    yield from (x, *(torch.empty(shape) for shape in ((0, 32), (32, 0), (0, 0))))


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "inputs", [shapes, other_dtypes, special_values, every_bfloat16, layouts, long_and_empty]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_bytes(
    name: str,
    inputs: Callable[[], Iterator[torch.Tensor]],
    dtype: torch.dtype,
    power_of_two: bool,
    device: torch.device,
    same_bytes: Compare,
) -> None:
    """Oracle: reference, on a row-major copy of the same arguments. Inputs in any layout, outputs row-major."""
    for x in inputs():
        for args in arguments(name, x, dtype, power_of_two):
            moved = (arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)
            got = getattr(ops, name)(x.to(device), *moved)
            want = getattr(reference, name)(x.contiguous(), *args)
            same_bytes(tuple(got) if isinstance(got, (tuple, list)) else got, want)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", MX_MODES)
def test_scale_of_every_significand(
    mode: str, dtype: torch.dtype, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: reference, which test_blocks.py holds to `frexp` in float64. One block for each boundary of a mode and its
    float32 neighbours, at each exponent of float32, subnormals and the largest included."""
    edges = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375, 1.9999999])
    edges = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(v)) for v in (0.0, 9.0))])
    amax = torch.cat([torch.ldexp(edges.double(), torch.tensor(e)).float() for e in range(-150, 128)])
    x = torch.zeros(amax.numel(), 32)
    x[:, 9] = -amax
    same_bytes(tuple(ops.cast_mx(x.to(device), dtype, mode)), reference.cast_mx(x, dtype, mode))
