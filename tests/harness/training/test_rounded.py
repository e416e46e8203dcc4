"""Operands that are rounded alone. Oracles: ml_dtypes' rounding with float64 products; the recipe's own emulation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from fp8core import RECIPES, Float8Linear, convert_to_float8_training
from harness.suites.ablation import OPERANDS, RoundedLinear, round_only

M, K, N = 48, 32, 64
FORMATS = {
    "input": ml_dtypes.float8_e4m3fn,
    "weight": ml_dtypes.float8_e4m3fn,
    "grad_output": ml_dtypes.float8_e5m2,
}


def tensors() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    layer = nn.Linear(K, N)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(N, K, generator=random))
        assert layer.bias is not None
        layer.bias.copy_(torch.randn(N, generator=random))
    return layer, torch.randn(M, K, generator=random), torch.randn(M, N, generator=random)


def passed(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(grad)
    weight = layer.get_parameter("weight").grad
    assert x.grad is not None
    assert weight is not None
    return {"output": output.detach(), "grad_input": x.grad, "grad_weight": weight}


def tensorwise(x: np.ndarray, operand: str) -> np.ndarray:
    """Rounded with one scale by ml_dtypes and brought back, float64."""
    largest = float(ml_dtypes.finfo(FORMATS[operand]).max)
    scale = np.float32(np.float64(largest) / np.float64(np.abs(x).max()))
    codes = (x * scale).astype(np.float32).astype(FORMATS[operand])
    return codes.astype(np.float64) / np.float64(scale)


@pytest.mark.parametrize("operand", OPERANDS)
def test_one_operand_is_rounded_wherever_it_is_read_and_no_other(operand: str) -> None:
    layer, x, grad = tensors()
    converted = Float8Linear.from_float(layer, "tensorwise")
    got = passed(RoundedLinear.from_float8(converted, [operand]), x, grad)
    mine = {"input": x, "weight": layer.weight.detach(), "grad_output": grad}
    exact = {
        name: tensorwise(t.numpy(), name) if name == operand else t.numpy().astype(np.float64)
        for name, t in mine.items()
    }
    assert layer.bias is not None
    due = {
        "output": exact["input"] @ exact["weight"].T + layer.bias.detach().numpy(),
        "grad_input": exact["grad_output"] @ exact["weight"],
        "grad_weight": exact["grad_output"].T @ exact["input"],
    }
    for name, value in due.items():
        # Sums of at most 64 float32 products: their rounding is far below one step of FP8 (2**-4)
        np.testing.assert_allclose(
            got[name].numpy(), value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_all_operands_rounded_are_the_emulated_recipe(recipe: str) -> None:
    layer, x, grad = tensors()
    emulated = Float8Linear.from_float(layer, RECIPES[recipe].emulated())
    want = passed(emulated, x, grad)
    got = passed(RoundedLinear.from_float8(Float8Linear.from_float(layer, recipe), OPERANDS), x, grad)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=name)


def test_every_float8_layer_of_a_model_is_replaced_and_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Sequential(nn.Linear(N, K, bias=False)))
    before = dict(model.named_parameters())
    model = convert_to_float8_training(model, config="tensorwise")
    round_only(model, ["weight"])
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert [type(m) for m in layers] == [RoundedLinear, RoundedLinear]
    assert all(p is before[name] for name, p in model.named_parameters())


def test_under_autocast_products_have_the_autocast_dtype() -> None:
    layer, x, grad = tensors()
    rounded = RoundedLinear.from_float8(Float8Linear.from_float(layer, "tensorwise"), ["input"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = rounded(x)
    assert output.dtype == torch.bfloat16
    output.backward(grad.to(torch.bfloat16))
    assert rounded.weight.grad is not None
    assert rounded.weight.grad.dtype == torch.float32
