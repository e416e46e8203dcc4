"""cast_input and operands: how many casts a step makes, and that sharing them changes no bit."""

from __future__ import annotations

import pytest
import torch
from recipes import SIXTEENS, on_cpu

from fp8core import E4M3FN, RECIPES, Float8Linear, cast_input, quantize


def qkv(name: str) -> list[Float8Linear]:
    torch.manual_seed(0)
    return [Float8Linear(32, 48, config=on_cpu(name)) for _ in range(3)]


def step(layers: list[Float8Linear], shared: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 8, 32, requires_grad=True)
    given = cast_input(x, *layers) if shared else x
    outputs = [layer(given) for layer in layers]
    sum((y * (i + 1)).square().sum() for i, y in enumerate(outputs)).backward()
    return [
        *outputs,
        x.grad,
        *(layer.weight.grad for layer in layers),
        *(layer.bias.grad for layer in layers),
    ]


@pytest.mark.parametrize("name", SIXTEENS)
def test_shared_casts_change_no_bit(name: str) -> None:
    """Oracle: each layer called on the tensor itself."""
    alone, together = qkv(name), qkv(name)
    want = step(alone, shared=False)
    got = step(together, shared=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for a, b in zip(alone, together, strict=True):  # what delayed scaling has seen, by layer
        assert (a.amaxes is None) == (b.amaxes is None)
        assert a.amaxes is None or torch.equal(a.amaxes.pending, b.amaxes.pending)


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


def test_any_gemm_can_stay_in_high_precision() -> None:
    """Oracle: the plain product for that GEMM, the full recipe for the others."""
    torch.manual_seed(0)
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    full = Float8Linear(32, 48, bias=False)
    for gemm in ("output", "grad_input", "grad_weight"):
        recipe = RECIPES["tensorwise"].in_high_precision(gemm)
        assert recipe.name == f"tensorwise-{gemm}_hp"
        assert recipe.fp8_gemms == 2
        layer = Float8Linear.from_float(full, recipe)
        got, want = ([y, *torch.autograd.grad(y, (x, full.weight), g)] for y in (layer(x), full(x)))
        plain = (x @ full.weight.t(), g @ full.weight, g.t() @ x)
        for name, a, b, c in zip(("output", "grad_input", "grad_weight"), got, want, plain, strict=True):
            torch.testing.assert_close(a, c if name == gemm else b, rtol=1e-6, atol=1e-6)
