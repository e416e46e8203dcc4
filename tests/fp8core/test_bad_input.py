"""Bad input: the right answer or one clear error, eager and compiled, with casts by plain code and by operators.

Oracle: the plain eager layer of float32, which test_linear.py holds to float64, or the definition by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from recipes import on_cpu
from torch import nn

from fp8core import RECIPES, Float8Linear

pytestmark = [  # both are torch's own, raised while it compiles anything at all
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
NAMES = tuple(RECIPES)
ROUTES = pytest.mark.parametrize(  # tracing takes seconds
    ("name", "kernels", "compiled"),
    [
        *((name, kernels, False) for name in NAMES for kernels in ("auto", "always")),
        ("tensorwise", "auto", True),
        ("rowwise", "always", True),
        ("blockwise", "always", True),
    ],
)
KERNELS = pytest.mark.parametrize("kernels", ["auto", "always"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
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


@ROUTES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_two_bytes(
    dtype: torch.dtype, name: str, kernels: str, compiled: bool, sqnr_db: Callable[..., float]
) -> None:
    """Oracle: the float32 layer over the same values: codes are the same, results differ by their own rounding.

    48 dB: rounding to bfloat16 keeps 55, and gradients have been rounded twice, codes of grad_output once anew.
    """
    layer = layer_of(name, kernels, dtype)
    wide = layer_of(name, "never")
    wide.load_state_dict(layer.float().state_dict())
    layer = layer.to(dtype)
    x = torch.randn(16, 32).to(dtype)
    got, want = step(runner(layer, compiled), layer, x)[0], step(wide, wide, x.float())[0]
    assert got.dtype == dtype
    assert sqnr_db(want, got) > 48


@COMPILED
@KERNELS
def test_a_tied_head(kernels: str, compiled: bool) -> None:
    """Oracle: the layers over two copies of the weight, its and the embedding's gradients added."""

    tokens, outputs, grads = torch.arange(16), [], []
    for shared in (True, False):
        torch.manual_seed(0)
        embed = nn.Embedding(48, 32)
        head = Float8Linear(32, 48, bias=False, config=RECIPES["rowwise"].with_kernels(kernels))
        head.weight = embed.weight if shared else nn.Parameter(embed.weight.detach().clone())
        model = nn.Sequential(embed, head)
        y = runner(model, compiled and shared)(tokens)
        y.square().sum().backward()
        outputs.append(y.detach())
        grads.append(sum(p.grad for p in model.parameters()))
        assert len(list(model.parameters())) == (1 if shared else 2)
    assert torch.equal(*outputs)
    torch.testing.assert_close(
        *grads, rtol=1e-5, atol=1e-5 * float(grads[1].abs().max())
    )  # another order of sums


@COMPILED
@KERNELS
def test_sizes_that_the_hardware_refuses(kernels: str, compiled: bool) -> None:
    """One error that names layer, GEMM and way out; both ways out run, padding and the backend without the rule."""
    recipe = RECIPES["tensorwise"].with_kernels(kernels)
    plain, x = nn.Linear(50, 48), torch.randn(16, 50)
    with pytest.raises(Exception, match=r"GEMM output of Float8Linear\(50, 48\): K=50 .* pad it"):
        runner(Float8Linear.from_float(plain, recipe), compiled)(x)
    want = Float8Linear.from_float(plain, recipe.emulated())(x)
    for way_out in (recipe.with_backend("triton"), replace(recipe, pad_inner_dim=True)):
        torch._dynamo.reset()
        got = runner(Float8Linear.from_float(plain, way_out), compiled)(x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
