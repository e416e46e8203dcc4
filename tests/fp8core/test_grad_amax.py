"""grad_amax: what a backward pass leaves is taken for the gradient it was left with, and for no other."""

from __future__ import annotations

import gc

import pytest
import torch

from fp8core import RECIPES, Float8Linear, SwiGLU, grad_amax
from fp8core.grad_amax import amax_of, note_amax

SEVEN = torch.tensor(7.0)


def test_a_view_is_the_same_gradient_and_anything_else_is_not() -> None:
    """Oracle: by hand: parts, other bits, other values and other tensors."""
    grad = torch.randn(4, 6)
    note_amax(grad, SEVEN)
    for same in (grad, grad.view(24), grad.view(2, 2, 6), grad.t(), grad.detach()):
        assert amax_of(same) is SEVEN
    others = [grad[:2], grad.view(torch.int32), grad.clone(), grad.double(), grad[:1].expand(4, 6)]
    assert all(amax_of(other) is None for other in others)
    part = grad[:2]
    note_amax(part, SEVEN)
    assert amax_of(part) is None
    grad.add_(1)
    assert amax_of(grad) is None


def test_memory_that_is_used_again_is_another_gradient() -> None:
    """Oracle: by hand: an allocator gives the same address to the next tensor of the same size, often at once."""
    for _ in range(100):
        grad = torch.empty(64)
        assert amax_of(grad) is None
        note_amax(grad, SEVEN)
        del grad
    gc.collect()
    note_amax(torch.empty(1), SEVEN)
    assert sum(not noted.storage.expired() for noted in grad_amax._noted.values()) <= 1


@pytest.mark.parametrize(("uses", "hook"), [(1, ""), (2, ""), (1, "returns"), (1, "in place")])
def test_gradients_are_those_without_it(uses: int, hook: str) -> None:
    """Oracle: the same where a copy hides the layers from the activation. An amax of a gradient that grew a thousandfold
    on its way would saturate it."""
    grads = []
    for fused in (True, False):
        torch.manual_seed(0)
        recipe = RECIPES["tensorwise"].with_kernels("always")
        layers = [Float8Linear(16, 32, bias=False, config=recipe) for _ in range(2)]
        x = torch.linspace(-3, 3, 2 * 16 * 16).view(2, 16, 16).requires_grad_()
        gate, up = (layer(x) for layer in layers)
        if hook:
            gate.register_hook(lambda grad: grad.mul_(1000) if hook == "in place" else grad * 1000)
        h = SwiGLU()(gate, up) if fused else SwiGLU()(gate.clone(), up.clone())
        loss = (h + 1000 * gate if uses == 2 else h).square().sum()
        grads.append(torch.autograd.grad(loss, [x, *(layer.weight for layer in layers)]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
