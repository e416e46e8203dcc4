"""Bad input: the right answer or one clear error, eager and compiled, with casts by plain code and by operators.

Oracle: the plain eager layer of float32, which test_linear.py holds to float64, or the definition by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from recipes import FP8, on_cpu
from torch import nn

from fp8core import Float8Linear

pytestmark = [  # both are torch's own, raised while it compiles anything at all
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
NAMES = FP8
ROUTES = pytest.mark.parametrize(  # tracing takes seconds
    ("name", "kernels", "compiled"),
    [
        *((name, kernels, False) for name in NAMES for kernels in ("auto", "always")),
        ("tensorwise", "auto", True),
        ("blockwise", "always", True),
    ],
)
Run = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def layer_of(name: str, kernels: str, dtype: torch.dtype = torch.float32) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear(32, 48, dtype=dtype, config=on_cpu(name).with_kernels(kernels))


def runner(layer: nn.Module, compiled: bool) -> Run:
    """The layer, or its whole graph; aot_eager traces and runs it without generating code."""
    return torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else layer


def step(run: Run, layer: Float8Linear, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, layer.weight])]


@ROUTES
def test_infinity_nan_and_zero(name: str, kernels: str, compiled: bool) -> None:
    """By hand: a row that holds Inf or NaN is NaN, zeros give the bias, and neither hides nor invents anything."""
    layer = layer_of(name, kernels)
    run = runner(layer, compiled)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(16, 32)
        x[3, 5] = bad
        y, grad_x, _ = step(run, layer, x)
        assert y[3].isnan().all()
        assert not grad_x[3].isfinite().any()
    y, grad_x, grad_weight = step(run, layer, torch.zeros(16, 32))
    assert torch.equal(y, layer.bias.detach().expand(16, 48))
    assert grad_x.isfinite().all()
    assert not grad_weight.any()


@ROUTES
def test_no_tokens_and_odd_layouts(name: str, kernels: str, compiled: bool) -> None:
    """Oracle: the same values in rows; of no token, an empty output and zero gradients."""
    layer, plain = layer_of(name, kernels), layer_of(name, "never")
    inputs = [torch.randn(2, 0, 32), torch.randn(32, 16).t()]
    if not compiled:
        inputs += [torch.randn(0, 32), torch.randn(1, 32).expand(16, 32), torch.randn(32, 64)[::2, ::2]]
    for x in inputs:
        torch._dynamo.reset()
        got, want = step(runner(layer, compiled), layer, x), step(plain, plain, x.contiguous())
        assert got[0].shape == (*x.shape[:-1], 48)
        assert all(map(torch.equal, got[:2], want))
        assert x.numel() or not got[2].any()
