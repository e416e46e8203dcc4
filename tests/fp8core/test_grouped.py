"""Grouped products against a Float8Linear for each expert, bit for bit, and against float64; padding of groups."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from mixtures import by_expert, ends, operands
from recipes import on_cpu

from fp8core import (
    RECIPES,
    grouped_mm,
    pad_groups,
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


def test_tensorwise_has_one_scale_for_tokens_and_one_for_each_expert() -> None:
    """Oracle: Float8Linear where every expert sees the same largest token and gradient, so that its scale is all's.

    The experts' weights differ by a factor of 2**10: with one scale for all, the smaller would lose bits.
    """
    sizes, recipe = (16, 32, 16), RECIPES["tensorwise"]
    x, weight, grad = operands(sizes)
    weight = (weight.detach() * torch.tensor([1.0, 2.0**-10, 1.0])[:, None, None]).requires_grad_()
    with torch.no_grad():
        for first in itertools.accumulate((0, *sizes[:-1])):
            x[first, 0], grad[first, 0] = 1000.0, 50.0
    output = grouped_mm(x, weight, ends(*sizes), config=recipe)
    grads = torch.autograd.grad(output, [x, weight], grad)
    for got, expected in zip(
        (output, *grads), by_expert(x, weight, ends(*sizes), grad, recipe, 16), strict=True
    ):
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


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([2, 16, 32, 128]))
def test_padding(sizes: list[int], multiple: int) -> None:
    """Oracle: a loop over groups. Each is filled with zeros; nothing is lost, and gradients come back to their rows."""
    x = torch.randn(sum(sizes), 3, requires_grad=True)
    rows = pad_groups(x, ends(*sizes), multiple)
    want = [-(-size // multiple) * multiple for size in sizes]
    assert rows.offsets.tolist() == list(itertools.accumulate(want))
    assert rows.offsets.dtype == torch.int32
    first = 0
    for group, end in zip(x.detach().split(sizes), rows.offsets.tolist(), strict=True):
        assert torch.equal(rows.x[first : first + len(group)], group)
        assert not rows.x[first + len(group) : end].any()
        first = end
    assert not rows.x[first:].any()
    assert torch.equal(rows.restore(rows.x), x)
    grad = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(rows.restore(rows.x * 2), [x], grad)[0], 2 * grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_tokens_stay_with_their_expert(bad: float) -> None:
    """Oracle: the finite tokens alone. Rowwise, a bad token spoils its row, and its expert's grad_weight; no more."""
    sizes = (16, 16)
    x, weight, grad = operands(sizes)
    with torch.no_grad():
        x[3, 5] = bad
    output = grouped_mm(x, weight, ends(*sizes))
    (grad_weight,) = torch.autograd.grad(output, [weight], grad)
    assert output[3].isnan().all()
    assert output[torch.arange(32) != 3].isfinite().all()
    assert grad_weight[0, :, 5].isnan().all()
    assert grad_weight[1].isfinite().all()


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


def test_autocast() -> None:
    """Oracle: the same call on bfloat16 tokens; weights are cast from float32."""
    x, weight, _ = operands((16, 16), 32, 48)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = grouped_mm(x, weight, ends(16, 16))
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, grouped_mm(x.bfloat16(), weight, ends(16, 16)))
