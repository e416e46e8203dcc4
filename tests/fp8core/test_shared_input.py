"""cast_input and operands: how many casts a step makes, and that sharing them changes no bit."""

from __future__ import annotations

import torch
from recipes import on_cpu

from fp8core import E4M3FN, Float8Linear, cast_input, quantize


def qkv(name: str) -> list[Float8Linear]:
    torch.manual_seed(0)
    return [Float8Linear(32, 48, config=on_cpu(name)) for _ in range(3)]


def test_shared_casts_under_autocast_and_without_gradients() -> None:
    layers = qkv("rowwise")
    x = torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        shared = cast_input(x, *layers)
        assert torch.equal(layers[1](shared), layers[1](x))
        assert shared.hp.dtype == torch.bfloat16
    with torch.no_grad():
        frozen = cast_input(x, *layers)
        assert frozen.for_grad_weight is None
        assert torch.equal(layers[0](frozen), layers[0](x))
    layers[0](frozen).sum().backward()  # made without gradients, used with them: cast when needed
    got, layers[0].weight.grad = layers[0].weight.grad, None
    layers[0](x).sum().backward()
    assert torch.equal(got, layers[0].weight.grad)


def test_a_float8_tensor_is_an_input() -> None:
    """Oracle: the tensor that it was cast from."""
    layer = Float8Linear(32, 48)
    x = torch.randn(2, 8, 32)
    q = quantize(x, E4M3FN)
    layer(q).square().sum().backward()
    got, layer.weight.grad = layer.weight.grad, None
    assert torch.equal(layer(q), layer(x))
    layer(x).square().sum().backward()
    assert torch.equal(got, layer.weight.grad)


# ---------------------------------------------------------------- overrides and bad input
