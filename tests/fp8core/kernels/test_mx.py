"""MX casts: four scale modes, told apart, against float64 exponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.kernels import ops, reference
from fp8core.scaling import MX_MODES

Compare = Callable[[Any, Any], None]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("mode", "dtype"), [("rceil", E4M3), ("even", E5M2)], ids=["rceil-e4m3", "even-e5m2"]
)
def test_bytes(
    mode: str,
    dtype: torch.dtype,
    all_bf16: torch.Tensor,
    finite_bf16: torch.Tensor,
    device: torch.device,
    same_bytes: Compare,
) -> None:
    """Oracle: reference. All bfloat16, odd shapes, float32; the modes differ in a scale alone, see below."""
    shapes = [torch.randn(shape) for shape in ((1, 1), (17, 63), (63, 170))]
    for x in (all_bf16, finite_bf16, *(s.bfloat16() for s in shapes), shapes[1]):
        for name in ("cast_mx", "cast_mx_both"):
            got = getattr(ops, name)(x.to(device), dtype, mode)
            same_bytes(tuple(got), getattr(reference, name)(x, dtype, mode))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", MX_MODES)
def test_scale_of_every_significand(
    mode: str, dtype: torch.dtype, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: reference, which test_blocks.py holds to `frexp` in float64. One block for each boundary of a mode (1, 1.75, 1.875, 1.9375) and its float32 neighbours, at
    each exponent of float32, subnormals and the largest included."""
    edges = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375, 1.9999999])
    edges = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(v)) for v in (0.0, 9.0))])
    amax = torch.cat([torch.ldexp(edges.double(), torch.tensor(e)).float() for e in range(-150, 128)])
    x = torch.zeros(amax.numel(), 32)
    x[:, 9] = -amax
    same_bytes(tuple(ops.cast_mx(x.to(device), dtype, mode)), reference.cast_mx(x, dtype, mode))


def test_unknown_mode(device: torch.device) -> None:
    with pytest.raises(ValueError, match="floor, ceil, rceil, even"):
        ops.cast_mx(torch.ones(1, 32, device=device), E4M3, "round")
