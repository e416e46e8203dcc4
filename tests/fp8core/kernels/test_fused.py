"""Fused producers: within one rounding of float64, and their amax and codes exactly those of their own result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.kernels import ops, reference

Compare = Callable[[Any, Any], None]
EPS = 1e-5
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SHAPES = pytest.mark.parametrize("shape", [(1, 16), (17, 63), (63, 252), (5, 1024)], ids=str)


def close(
    got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor | None = None, roundings: int = 16
) -> None:
    """|got - exact| <= half an ulp of the output dtype, plus `roundings` float32 roundings of `magnitude`.

    `magnitude` is what the float32 arithmetic handled before any cancellation, by default the result itself.
    """
    size = exact.abs() if magnitude is None else magnitude
    bound = HALF_ULP[got.dtype] * exact.abs() + roundings * 2.0**-24 * size + 2.0**-133
    excess = ((got.cpu().double() - exact).abs() - 1.01 * bound).max()
    assert excess <= 0, f"{float(excess)} above the bound"


def norm_inputs(
    shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype), torch.randn(shape).to(dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("added", [False, True])
def test_norm(
    added: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: torch's own sum, bit for bit; the formula in float64, and what it gives with the kernel's own rstd.

    A kernel that is tuned for itself sums a row in its own order, so rstd differs from its neighbours' in the last bits.
    """
    x, weight, delta = norm_inputs(shape, dtype)
    total = x + delta if added else x
    exact = torch.rsqrt(total.double().square().mean(1, keepdim=True) + EPS)
    on = [t.to(device) for t in ((x, delta) if added else (x,))]
    for suffix in ("", "_amax"):
        got = getattr(ops, ("add_rms_norm" if added else "rms_norm") + suffix)(*on, weight.to(device), EPS)
        rstd = got[1 + added].cpu()
        close(rstd, exact, roundings=shape[1])
        y = (total.float() * rstd * weight.float()).to(dtype)
        amaxes = [reference.amax(y)] if suffix else []
        same_bytes(tuple(got), (*[total] * added, y, rstd, *amaxes))


@DTYPES
@SHAPES
@pytest.mark.parametrize("added", [False, True])
def test_norm_backward(added: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Oracle: autograd through the formula, and the sum before it, in float64."""
    x, weight, grad_y = norm_inputs(shape, dtype)
    grad_sum = torch.randn(shape).to(dtype) * added
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    rstd = torch.rsqrt(x64.square().mean(1, keepdim=True) + EPS)
    torch.autograd.backward((x64 * 1, x64 * rstd * weight64), (grad_sum.double(), grad_y.double()))
    assert x64.grad is not None
    assert weight64.grad is not None
    rstd = rstd.detach()
    first, *rest = (t.to(device) for t in (grad_y, x, weight, rstd.float()))
    if added:
        grad_x, grad_weight = ops.add_rms_norm_backward(first, grad_sum.to(device), *rest)
    else:
        grad_x, grad_weight = ops.rms_norm_backward(first, *rest)
    g, n = (grad_y.double() * weight.double()).abs(), (x.double() * rstd).abs()
    before_cancellation = grad_sum.double().abs() + rstd * (g + n * (g * n).mean(1, keepdim=True))
    close(grad_x, x64.grad, before_cancellation, roundings=shape[1] + 16)
    close(grad_weight, weight64.grad, (grad_y.double().abs() * n).sum(0), roundings=shape[0] + 16)


def test_norm_of_rows_that_are_too_long(device: torch.device) -> None:
    x = torch.zeros(1, 65537, device=device)
    with pytest.raises(ValueError, match="65536 columns"):
        ops.rms_norm(x, x[0], EPS)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (17, 63), (63, 252)], ids=str)
def test_swiglu(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, same_bytes: Compare
) -> None:
    """Oracle: autograd through silu(gate) * up in float64."""
    gate, up, grad_h = ((torch.randn(shape) * 3).to(dtype) for _ in range(3))
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = torch.nn.functional.silu(gate64) * up64
    exact.backward(grad_h.double())
    assert gate64.grad is not None
    assert up64.grad is not None
    on = (gate.to(device), up.to(device))
    h = ops.swiglu(*on)
    close(h, exact.detach())
    result = h.cpu()
    same_bytes(ops.swiglu_amax(*on), (result, reference.amax(result)))
    grads = ops.swiglu_backward(grad_h.to(device), *on)
    s = torch.sigmoid(gate.double())
    before_cancellation = (grad_h.double() * up.double() * s).abs() * (1 + (gate.double() * (1 - s)).abs())
    close(grads[0], gate64.grad, before_cancellation, roundings=32)
    close(grads[1], up64.grad)


def test_swiglu_of_large_magnitudes(device: torch.device) -> None:
    """Oracle: the limits of silu: 0 on the left, the identity on the right, with no overflow on the way."""
    gate = torch.tensor([[-300.0, -90.0, 90.0, 300.0]], device=device)
    h = ops.swiglu(gate, torch.ones_like(gate))
    assert h.isfinite().all()
    assert h[0, :2].abs().max() < 1e-30
    assert h[0, 2:].tolist() == [90.0, 300.0]
