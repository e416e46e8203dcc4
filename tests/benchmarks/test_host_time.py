"""Time of an eager Float8Linear; run by `make bench`, never by `make test`.

Bars, of one forward and backward pass, both arms in this process and one thread, in rounds of alternating order:

    ours / nn.Linear    at most 2.2 at 16 x 16, kernels stubbed: what the library itself costs beside the GEMMs
    torchao / ours      at least 2.4 (tensorwise) and 2.0 (rowwise) at 16 x 16, plain operators on a CPU; at least 1 at 1024^3,
                        where both multiply by the same operator and the gain is in casts (three against six)
    ours / bare         at most 1.32 (tensorwise) and 1.76 (rowwise) at 16 x 16, plain operators: an autograd function of three
                        casts and three products, without a layer. Where the bars were set it took 2.73 times an nn.Linear, and
                        a layer was to take 3.6 and 4.8; how long FP8 products of that size take differs between CPUs
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from host_time import SIZE, paired_ratio, python_calls, stubbed_kernels, training_step
from torch import nn

from fp8core import Float8Linear
from fp8core.recipe import recipe_named

pytestmark = pytest.mark.benchmark_bar


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """More would wait for each other in kernels that have nothing to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def linear(size: int = SIZE, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return nn.Linear(size, size, bias=False, dtype=dtype)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_host_time_against_a_linear(name: str) -> None:
    base = linear()
    ours = Float8Linear.from_float(base, recipe_named(name).with_kernels("always"))
    with stubbed_kernels():
        calls = python_calls(training_step(ours)).total()
        ratio, mine, theirs = paired_ratio(training_step(ours), training_step(base))
    print(
        f"\n{name}: ours / nn.Linear = {ratio:.2f} ({mine:.0f} / {theirs:.0f} us, {calls} Python calls; bar 2.2)"
    )
    assert ratio <= 2.2


class Bare(torch.autograd.Function):
    """Three casts by one scale each, three products, and nothing else."""

    @staticmethod
    def cast(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        scale = largest / x.abs().amax().float().clamp_min(1e-12)
        return x.float().mul_(scale).to(dtype), scale.reciprocal()

    @staticmethod
    def product(
        a: torch.Tensor, b_t: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
    ) -> torch.Tensor:
        return torch._scaled_mm(a, b_t.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (x, of_x), (weight, of_weight) = (Bare.cast(t, E4M3_MAX, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(x, of_x, weight, of_weight)
        return Bare.product(x, weight, of_x, of_weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, of_x, weight, of_weight = ctx.saved_tensors
        grad, of_grad = Bare.cast(grad, E5M2_MAX, torch.float8_e5m2)
        turned = [t.t().contiguous() for t in (weight, grad, x)]
        return Bare.product(grad, turned[0], of_grad, of_weight), Bare.product(*turned[1:], of_grad, of_x)


E4M3_MAX, E5M2_MAX = torch.tensor(448.0), torch.tensor(57344.0)


class BareLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Bare.apply(input, self.weight)
        return y


@pytest.mark.parametrize(("name", "bar"), [("tensorwise", 1.32), ("rowwise", 1.76)])
def test_a_layer_against_a_bare_function(name: str, bar: float) -> None:
    bare, base = BareLinear(SIZE, SIZE, bias=False, dtype=torch.bfloat16), linear()
    ours = training_step(Float8Linear.from_float(linear(), name))
    ratio, mine, theirs = paired_ratio(ours, training_step(bare))
    of_linear, *_ = paired_ratio(ours, training_step(base))
    print(
        f"\n{name}: ours / bare = {ratio:.2f} ({mine:.0f} / {theirs:.0f} us; bar {bar}); / nn.Linear {of_linear:.2f}"
    )
    assert ratio <= bar


@pytest.mark.parametrize(
    ("name", "size", "dtype", "bar"),
    [
        ("tensorwise", SIZE, torch.bfloat16, 2.4),
        ("rowwise", SIZE, torch.bfloat16, 2.0),
        *(
            (name, 1024, dtype, 1.0)
            for name in ("tensorwise", "rowwise")
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
    ids=str,
)
def test_a_layer_against_torchao(name: str, size: int, dtype: torch.dtype, bar: float) -> None:
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    torchao = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear as TheirLinear

    theirs = TheirLinear.from_float(linear(size, dtype), torchao.Float8LinearConfig.from_recipe_name(name))
    ours = Float8Linear.from_float(linear(size, dtype), name)
    steps = (training_step(layer, dtype) for layer in (theirs, ours))
    ratio, slow, fast = paired_ratio(*steps, *((1, 9) if size > SIZE else ()))
    print(f"\n{name}, {dtype}, {size}: torchao / ours = {ratio:.2f} ({slow:.0f} / {fast:.0f} us; bar {bar})")
    assert ratio >= bar
