"""Rows of a step. Oracles: torch's FlopCounterMode; bytes and lifetimes by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8core import convert_to_float8_training
from fp8core.proof.formulas import register_with_torch
from fp8core.proof.recorder import Recorder, alive_and_most


class Repeated(nn.Module):
    """Two layers, the second of which is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96, bias=False), nn.Linear(96, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x).relu(), use_reentrant=False).square().sum()


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
@pytest.mark.parametrize("tensors", [nullcontext, FakeTensorMode])
def test_products_are_those_of_torch(
    recipe: str | None, tensors: type[AbstractContextManager[object]]
) -> None:
    """And each belongs to the layer that runs, forward and recomputed, and to the pass that runs."""
    register_with_torch()
    with tensors():
        model: nn.Module = Repeated()
        if recipe is not None:
            model = convert_to_float8_training(model, config=recipe)
        x = torch.randn(48, 64, requires_grad=True)
        with FlopCounterMode(display=False) as torchs, Recorder(model) as recorder:
            model(x).backward()
    found = {
        (row.owner, row.phase): sum(product.flops for product in row.products)
        for row in recorder.rows
        if row.products
    }
    first, second = 2 * 48 * 64 * 96, 2 * 48 * 96 * 32
    assert sum(p.flops for row in recorder.rows for p in row.products or ()) == torchs.get_total_flops()
    assert found["first", "forward"] == first
    assert found["second", "forward"] == second
    assert ("second", "recompute") in found or recipe is None, "nn.Linear's product is not needed again"
    assert ("", "backward") in found
    assert not recorder.running


@pytest.mark.parametrize("tensors", [nullcontext, FakeTensorMode])
def test_storages_are_read_written_born_and_die(tensors: type[AbstractContextManager[object]]) -> None:
    """By hand: x is 400 bytes and from outside; y and z are made, z into itself; a view moves and makes nothing."""
    with tensors():
        x = torch.ones(10, 10)
        with Recorder() as recorder:
            y = x[:5] + 1
            z = y.t().exp()
            del y
            z.mul_(2)
            once = torch.ones(1000).sum()
        kept = recorder.rows[:]
    made = [(row.operator.overloadpacket.__name__, row.born, row.died) for row in kept if row.born]
    assert made == [("add", 200, 0), ("exp", 200, 200), ("ones", 4000, 0), ("sum", 4, 4000)]
    add, exp, scaled = (row for row in kept if row.operator.overloadpacket.__name__ in ("add", "exp", "mul_"))
    assert [list(each.values()) for each in (add.read, add.written)] == [[200], [200]]
    assert exp.read == add.written, "a transpose is the same storage"
    assert scaled.read == scaled.written == exp.written
    assert alive_and_most(kept) == (200 + once.nbytes, 200 + 4000 + once.nbytes)
    assert z.nbytes == 200
