"""verify leaves no trace: weights, buffers, gradients, optimizer states, amax histories and random numbers, bit for bit.

Oracle: copies of all of them taken before.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8core import convert_to_float8_training, update_scales, verify
from fp8core.history import tensors_of


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32))
    return convert_to_float8_training(nn.Sequential(*layers), config=name)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that a step changes."""
    tensors = [*tensors_of(model), *(p.grad for p in model.parameters())]
    known = [(m.updates, m.ready) for m in model.modules() if hasattr(m, "updates")]
    numbers = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return copy.deepcopy([tensors, optimizer.state_dict(), known, numbers])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("fails_in_pass", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_nothing_changes(name: str, fails_in_pass: int) -> None:
    """An optimizer, writes by hand, random numbers of three libraries; the step may raise in any pass."""
    model = model_of(name)
    model.register_buffer("steps", torch.ones(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    passes = []

    def step() -> None:
        passes.append(random.random() + np.random.rand())  # noqa: NPY002
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
            torch.add(model.steps, 1, out=model.steps)
        update_scales(model)
        if len(passes) == fails_in_pass:
            raise RuntimeError("of the step")

    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    update_scales(model)
    before = state(model, optimizer)
    if fails_in_pass:
        with pytest.raises(RuntimeError, match="of the step"):
            verify(step, model, announce=False)
    else:
        proof = verify(step, model, announce=False)
        assert proof.ok, proof.problems
        assert passes[0] == passes[1] == passes[2]
    assert same(before, state(model, optimizer))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_by_half_precision_sums_are_warned_of() -> None:
    """A bfloat16 gradient that two microbatches add up in: PyTorch's own rounding, no fault but a loss."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64)).bfloat16(), config="tensorwise")

    def step() -> None:
        for _ in range(2):
            model(torch.randn(16, 32).bfloat16()).float().square().mean().backward()

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.problems
    assert any("add up in bfloat16" in warning for warning in proof.warnings)
