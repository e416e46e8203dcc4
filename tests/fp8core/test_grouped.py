"""Grouped products against a Float8Linear for each expert, bit for bit, and against float64; padding of groups."""

from __future__ import annotations

import pytest
import torch
from mixtures import by_expert, ends, operands
from recipes import on_cpu

from fp8core import (
    grouped_mm,
)
from fp8core.experts.grouped import HIGH_PRECISION, aligned_grouped_mm, alignment

EXACT = (
    "rowwise",
    "rowwise_with_gw_hp",
    "blockwise",
    "mxfp8",
)  # one expert's scales know nothing of another's
SIZES = {
    "uneven": (16, 48, 32),
    "not multiples of 16": (5, 17, 30),
    "an expert without tokens": (20, 0, 12),
    "all on one": (0, 40, 0),
    "more experts than tokens": (1, 0, 1, 0, 0, 0),
    "no tokens": (0, 0),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("name", EXACT)
def test_each_expert_is_a_float8linear(name: str, sizes: tuple[int, ...]) -> None:
    """Oracle: `Float8Linear` on each expert's tokens, filled up with zeros; the same bits of output and gradients."""
    recipe = on_cpu(name)
    x, weight, grad = operands(sizes)
    output = grouped_mm(x, weight, ends(*sizes), config=recipe)
    grads = torch.autograd.grad(output, [x, weight], grad)
    want = by_expert(x, weight, ends(*sizes), grad, recipe, alignment(recipe))
    for got, expected in zip((output, *grads), want, strict=True):
        assert torch.equal(got, expected)


def test_high_precision_is_the_plain_product() -> None:
    """Oracle: float64, with gradients, of float32."""
    x, weight, grad = operands((16, 48, 0))
    output = aligned_grouped_mm(x, weight, ends(16, 48, 0), HIGH_PRECISION)
    grads = torch.autograd.grad(output, [x, weight], grad)
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = torch.cat([x64[:16] @ w64[0].t(), x64[16:] @ w64[1].t()])
    for one, other in zip(
        (output, *grads), (want, *torch.autograd.grad(want, [x64, w64], grad.double())), strict=True
    ):
        assert (one.double() - other).norm() < 1e-6 * other.norm()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("tensorwise", "aot_eager"),
        ("rowwise", "aot_eager"),
        ("blockwise", "aot_eager"),
        pytest.param("rowwise", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    """Oracle: eager. One graph: padding, casts and products have sizes that depend on no data; other offsets reuse it."""
    x, weight, grad = operands((16, 16, 16))
    torch._dynamo.reset()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=backend, dynamic=False)
    for sizes in ((5, 27, 16), (48, 0, 0)):
        with torch._dynamo.config.patch(error_on_recompile=sizes[0] == 48):
            output = compiled(x, weight, ends(*sizes), config=on_cpu(name))
        want = grouped_mm(x, weight, ends(*sizes), config=on_cpu(name))
        grads = torch.autograd.grad(output, [x, weight], grad)
        assert torch.equal(output, want)
        for got, expected in zip(grads, torch.autograd.grad(want, [x, weight], grad), strict=True):
            assert torch.equal(got, expected)
