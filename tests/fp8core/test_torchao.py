"""The same codes, scales, outputs and gradients as torchao.float8 0.18, bit for bit; exceptions by name.

Exceptions, each shown by a test below:

- A power-of-two scale 1 to 5 ulp below a power of two: torchao's float32 logarithm rounds it up.
- Rowwise float32 scales without fast accumulation (no published recipe): torchao rounds the unscaled product
  to bfloat16 and scales that; fp8core scales before it rounds.
- Rowwise without fast accumulation at inputs of 3e37: torch adds scaled products, whose running sums leave float32;
  torchao scales the sum.
- `emulate=True` with float32 scales: torchao scales each operand before the sum, fp8core the sum.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable

import pytest
import torch
from recipes import TORCHAO
from torch import nn

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
torchao = pytest.importorskip("torchao.float8")

from torchao.float8.config import ScalingGranularity as TheirGranularity  # noqa: E402
from torchao.float8.float8_linear import Float8Linear as TheirLinear  # noqa: E402
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # noqa: E402
from torchao.float8.float8_training_tensor import LinearMMConfig  # noqa: E402
from torchao.float8.float8_utils import amax_to_scale  # noqa: E402

from fp8core import E4M3FN, E5M2, Float8Linear, Float8LinearConfig, quantize  # noqa: E402
from fp8core.config import CastConfig, ScalingGranularity  # noqa: E402
from fp8core.scaling import compute_scale  # noqa: E402


def step(layer: nn.Module, x: torch.Tensor, grad_output: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    output = layer(x)
    output.backward(grad_output)
    return [output.detach(), x.grad, *(p.grad for p in layer.parameters())]


def both(
    ours: object, theirs: object, x: torch.Tensor, bias: bool = True, N: int = 48
) -> list[tuple[torch.Tensor, ...]]:
    """(ours, torchao's) for output, grad_input, grad_weight and grad_bias."""
    base = nn.Linear(x.shape[-1], N, bias=bias, dtype=x.dtype)
    grad_output = torch.randn(*x.shape[:-1], N).to(x.dtype)
    mine = step(Float8Linear.from_float(copy.deepcopy(base), ours), x, grad_output)
    return list(zip(mine, step(TheirLinear.from_float(base, theirs), x, grad_output), strict=True))


def inputs(kind: str, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(2, 16, 64)
    if kind == "outliers":
        x[0, 3] *= 1e4
        x[1, :, 5] *= 1e-4
    elif kind == "zero rows":
        x[:, ::3] = 0
    elif kind == "inf":
        x[0, 1, 2] = torch.inf
    elif kind == "nan":
        x[1, 2, 3] = torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("kind", ["gaussian", "outliers", "zero rows", "inf", "nan"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TORCHAO)
def test_linear_is_bitwise_equal(
    name: str, dtype: torch.dtype, bias: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: torchao's Float8Linear through the real `_scaled_mm`: output and every gradient. Without oneDNN, which on a CPU
    with AMX sums torchao's products, and not ours, in another order."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    config = torchao.Float8LinearConfig.from_recipe_name(name)
    for mine, theirs in both(name, config, inputs(kind, dtype), bias):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dim", [0, -1, None], ids=["dim 0", "dim -1", "tensorwise"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_bitwise_equal(
    dtype: torch.dtype, fmt: object, dim: int | None, pow2: bool
) -> None:
    """Oracle: torchao's dynamic cast; its scale is the reciprocal of our scale_inv before rounding."""
    x = (torch.randn(48, 80) * torch.logspace(-6, 3, 48)[:, None]).to(dtype)
    theirs = hp_tensor_to_float8_dynamic(
        x,
        fmt.dtype,
        LinearMMConfig(),
        scaling_granularity=TheirGranularity.TENSORWISE if dim is None else TheirGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=pow2,
    )
    granularity = "tensorwise" if dim is None else "rowwise"
    mine = quantize(x, fmt, granularity, dim=-1 if dim is None else dim, power_of_two=pow2)
    assert torch.equal(mine.qdata.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(mine.scale_inv, theirs._scale.reciprocal())


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_scales_of_every_bfloat16_amax(fmt: object) -> None:
    """Oracle: torchao's amax_to_scale on all 32,640 finite non-negative bfloat16 values, Inf and NaN."""
    amax = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16).float()
    for pow2 in (False, True):
        mine, theirs = compute_scale(amax, fmt, pow2)[0], amax_to_scale(amax, fmt.dtype, pow2)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_exception_power_of_two_band() -> None:
    """torchao differs only where the scale is 1 to 5 ulp below a power of two, and then by a factor of 2."""
    near = torch.cat(
        [torch.tensor([7.0 * 2**k]).view(torch.int32) + torch.arange(-64, 65) for k in range(-8, 9)]
    )
    amax = torch.cat([near.int().view(torch.float32), torch.rand(2**16) * 100 + 1e-3])
    exact, mine = compute_scale(amax, E4M3FN)[0], compute_scale(amax, E4M3FN, power_of_two=True)[0]
    theirs = amax_to_scale(amax, torch.float8_e4m3fn, True)
    differs = mine != theirs
    assert 0 < differs.sum() < 200
    assert (theirs[differs] == 2 * mine[differs]).all()
    ulp_below = theirs.view(torch.int32) - exact.view(torch.int32)
    assert ((ulp_below[differs] >= 1) & (ulp_below[differs] <= 5)).all()
    assert compute_scale(torch.tensor(7.0).nextafter(torch.tensor(8.0)), E4M3FN, True)[0] == 32


@pytest.mark.parametrize("name", TORCHAO)
def test_emulation_keeps_the_recipe(name: str) -> None:
    """Oracle: torchao's emulation. Power-of-two scales commute with the sum; float32 scales round it (exception)."""
    theirs = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(name), emulate=True)
    mine = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    for a, b in both(mine, theirs, inputs("gaussian", torch.float32)):
        if name == "tensorwise":
            torch.testing.assert_close(a, b, rtol=0, atol=4e-6 * float(b.abs().max()))
        else:
            assert torch.equal(a, b)


def test_padding_is_bitwise_equal_where_both_pad() -> None:
    """Oracle: torchao with pad_inner_dim, which pads contracted dimensions only; on CPU that is enough."""
    theirs = torchao.Float8LinearConfig(pad_inner_dim=True)
    for a, b in both(Float8LinearConfig(pad_inner_dim=True), theirs, torch.randn(17, 50), N=21):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.abs().max()))


def test_exception_rowwise_float32_scales_without_fast_accumulation(sqnr_db: Callable[..., float]) -> None:
    """A hand-made configuration: rowwise scales that are no powers of two."""
    row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
    mine = Float8LinearConfig(row, None, row, None, row, None)
    their_row = torchao.CastConfig(
        scaling_granularity=TheirGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn
    )
    theirs = torchao.Float8LinearConfig(their_row, None, their_row, None, their_row, None)
    output, grad_input, *_ = both(mine, theirs, inputs("gaussian", torch.bfloat16))
    assert torch.equal(*output)  # fast accumulation: the same rowwise kernel
    assert not torch.equal(*grad_input)
    assert sqnr_db(*grad_input) > 50  # one bfloat16 rounding is 55 dB


def test_exception_rowwise_sums_that_leave_float32() -> None:
    """Inputs of 3e37. Oracle: sums of magnitudes of the scaled products, which bound every running sum in whatever order:
    ours overflows more often, only where they leave float32, and is torchao's, bit for bit, elsewhere."""
    x, grad = 3e37 * torch.randn(64, 64), torch.randn(64, 64)
    base = nn.Linear(64, 64, bias=False)
    ours = Float8Linear.from_float(copy.deepcopy(base), Float8LinearConfig.from_recipe_name("rowwise"))
    theirs = TheirLinear.from_float(base, torchao.Float8LinearConfig.from_recipe_name("rowwise"))
    got, other = (step(layer, x, grad)[-1] for layer in (ours, theirs))
    a = quantize(grad.t().contiguous(), E4M3FN, "rowwise", dim=1, power_of_two=True)
    b = quantize(x, E4M3FN, "rowwise", dim=0, power_of_two=True)
    magnitudes = a.dequantize(torch.float64).abs() @ b.dequantize(torch.float64).abs()
    over = ~got.isfinite()
    assert over.sum() > (~other.isfinite()).sum()
    assert (magnitudes[over] > torch.finfo(torch.float32).max).all()
    assert torch.equal(got[~over], other[~over])
