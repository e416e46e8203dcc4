"""scaled_linear, and the example that builds layers of functions. Oracle: Float8Linear, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from recipes import FP8
from torch import nn

import fp8core
from fp8core import RECIPES, Float8Linear, Float8Tensor, quantize, scaled_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

STATELESS = [name for name in FP8 if RECIPES[name].scaling == "dynamic"]
SHAPES: list[tuple[int, ...]] = [(32, 48), (2, 16, 48), (3, 1, 16, 48), (0, 48)]
DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]


def example() -> Any:
    path = Path(__file__).parents[2] / "docs/examples/low_level/own_linear.py"
    spec = importlib.util.spec_from_file_location("own_linear", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_on_cpu(name: str) -> fp8core.Recipe:
    """Recipes that backend "torch" has no CPU kernel for are emulated."""
    recipe = RECIPES[name]
    return recipe if name.startswith(("tensorwise", "rowwise")) else recipe.emulated()


def tensors(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, nn.Linear, Tensor]:
    """An input with an outlier, a layer, and a gradient of its output."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtypes[0])
    x[..., 5] *= 300
    base = nn.Linear(48, 64, bias=False, dtype=dtypes[1])
    return x, base, torch.randn(*shape[:-1], 64).to(dtypes[0])


def passed(fn: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor) -> list[bytes]:
    x = x.detach().requires_grad_()
    weight.grad = None
    y = fn(x)
    y.backward(grad.to(y.dtype))
    found = [y.detach(), x.grad, weight.grad]
    return [
        str((t.dtype, t.shape)).encode() + t.contiguous().view(torch.uint8).numpy().tobytes()
        for t in found
        if t is not None
    ]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", STATELESS)
def test_it_is_the_module(name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    recipe = recipe_on_cpu(name)
    x, base, grad = tensors(shape, dtypes)
    layer = Float8Linear.from_float(base, recipe)
    want = passed(layer, x, base.weight, grad)
    assert passed(lambda x: scaled_linear(x, base.weight, recipe), x, base.weight, grad) == want
    assert len(want) == 3


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_autocast_reaches_the_input_alone(name: str) -> None:
    x, base, grad = tensors((32, 48), DTYPES[1])
    layer = Float8Linear.from_float(base, name)
    with torch.autocast("cpu", torch.bfloat16):
        want = passed(layer, x, base.weight, grad)
        assert passed(lambda x: scaled_linear(x, base.weight, name), x, base.weight, grad) == want
    assert want[0].startswith(b"(torch.bfloat16")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_compiled_it_is_one_graph_with_the_bits_of_eager_mode(name: str) -> None:
    x, base, grad = tensors((2, 16, 48), DTYPES[0])
    graphs: list[object] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    compiled = torch.compile(lambda x: scaled_linear(x, base.weight, name), backend=count, fullgraph=True)
    want = passed(lambda x: scaled_linear(x, base.weight, name), x, base.weight, grad)
    assert passed(compiled, x, base.weight, grad) == want
    assert passed(compiled, x, base.weight, grad) == want
    assert len(graphs) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_a_module_of_ones_own(bias: bool) -> None:
    x, _, grad = tensors((32, 48), DTYPES[0])
    mine = example().MyLinear(48, 64, bias=bias, dtype=torch.bfloat16)
    layer = Float8Linear.from_float(mine, mine.recipe)
    assert passed(mine, x, mine.weight, grad) == passed(layer, x, layer.weight, grad)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_an_autograd_function_of_ones_own(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, base, grad = tensors((32, 48), dtypes)
    layer, apply = Float8Linear.from_float(base, "tensorwise"), example().Mine.apply
    want = passed(layer, x, base.weight, grad)
    assert passed(lambda x: apply(x, base.weight), x, base.weight, grad) == want


def test_codes_that_were_gathered() -> None:
    """Shards cast by the scale of the whole, as a weight's hooks do under FSDP2."""
    x, base, grad = tensors((32, 48), DTYPES[0])
    own, whole = example(), base.weight.detach()
    amax = whole.abs().amax().float()
    sent = [own.before_gather(shard, amax) for shard in whole.chunk(2)]
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in sent]).view(torch.float8_e4m3fn)
    gathered = own.after_gather(codes, sent[0][1], whole.dtype).requires_grad_()
    want = passed(Float8Linear.from_float(base, "tensorwise"), x, base.weight, grad)
    assert passed(lambda x: scaled_linear(x, gathered, "tensorwise"), x, gathered, grad) == want


def test_what_it_keeps_between_calls_is_nothing() -> None:
    x, base, _ = tensors((32, 48), DTYPES[0])
    before = scaled_linear(x, base.weight)
    with torch.no_grad():
        base.weight.mul_(2)
    assert torch.equal(scaled_linear(x, base.weight), 2 * before)


X, W = torch.randn(16, 32), torch.randn(48, 32)
REFUSED = {
    "state": (ValueError, "remembers amaxes", lambda: scaled_linear(X, W, "delayed")),
    "recipe": (ValueError, "rowwsie", lambda: scaled_linear(X, W, "rowwsie")),
    "K": (ValueError, r"expected \[\.\.\., 32\]", lambda: scaled_linear(X[:, :16], W)),
    "N": (ValueError, "not a multiple of 16", lambda: scaled_linear(X.requires_grad_(), W[:17])),
    "vector": (ValueError, r"expected \[N, K\]", lambda: scaled_linear(X, W[0])),
    "float64": (TypeError, "float64", lambda: scaled_linear(X.double(), W)),
    "float64 weight": (TypeError, "float64", lambda: scaled_linear(X, W.double())),
    "list": (TypeError, "x is a list", lambda: scaled_linear([1.0], W)),  # type: ignore[arg-type]
    "codes of another format": (
        ValueError,
        "wants e4m3",
        lambda: scaled_linear(X, quantize(W, torch.float8_e5m2)),
    ),
    "codes for one of two products": (
        ValueError,
        "grad_input wants",
        lambda: scaled_linear(X.detach().requires_grad_(), quantize(W, "e4m3fn", "rowwise"), "rowwise"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    error, words, call = REFUSED[case]
    with pytest.raises(error, match=words):
        call()


def test_a_few_tokens_run_in_high_precision_where_the_recipe_says_so() -> None:
    from dataclasses import replace

    x, weight = torch.randn(17, 32), nn.Parameter(torch.randn(48, 32))
    y = scaled_linear(x, weight, replace(RECIPES["tensorwise"], min_tokens="bf16"))
    assert torch.equal(y, nn.functional.linear(x, weight))
    assert not isinstance(y, Float8Tensor)
