"""Oracles: the same steps without residency (bitwise), storages counted in bytes, an allocator that runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import TinyLM, tiny_lm, tokens
from torch import Tensor, nn

from fp8core.recipe import RECIPES
from harness.training.setup import Setup, Trainee, prepare
from harness.training.timed import Residency, keep


def trainee(recipe: str = "", model: nn.Module | None = None, **changes: Any) -> Trainee:
    made = Setup(
        **({"model": "tiny", "batch": 4, "seq": 8, "compute": "fp32"} | changes),
        recipe=RECIPES[recipe] if recipe else None,
    )
    return prepare(made, "cpu", model if model is not None else tiny_lm(made.weight_dtype))


def train(made: Trainee, steps: int = 3) -> list[Tensor]:
    """Losses of some steps, then the weights."""
    losses = [made.step([tokens(step)]) for step in range(steps)]
    return losses + [p.detach().clone() for p in made.model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def held_bytes(made: Trainee, resident: Residency | None = None) -> int:
    """Bytes of weights, gradients, the optimizer's state and buffers, and of the copies that the residency keeps."""
    state = [v for s in made.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    grads = [p.grad for p in made.model.parameters() if p.grad is not None]
    kept = [v for v in resident._buffers.values() if isinstance(v, Tensor)] if resident is not None else []
    held = [*made.model.parameters(), *made.model.buffers(), *grads, *state, *kept]
    return sum(t.untyped_storage().nbytes() for t in held)


@pytest.mark.parametrize(
    ("compute", "recipe"),
    [("fp32", ""), ("fp32", "static"), ("bf16_autocast", "delayed"), ("bf16", "tensorwise")],
)
def test_each_block_trains_the_same_steps(compute: str, recipe: str) -> None:
    """Bitwise those of a trainee that was never anything but resident, three times over."""
    plain, made = trainee(recipe, compute=compute), trainee(recipe, compute=compute)
    resident = Residency(made, keep(made.model), "cpu")
    want = train(plain)
    for _ in range(3):
        with resident():
            assert same(train(made), want)


def test_memory_that_is_not_the_allocators_own_is_moved() -> None:
    """Weights over NumPy's memory, one storage seen by two parameters, and one parameter in two places."""
    model = tiny_lm()
    both = torch.from_numpy(torch.randn(2 * 64 * 32).numpy())
    model.up.weight = nn.Parameter(both[: 64 * 32].view(64, 32))
    model.down.weight = nn.Parameter(both[64 * 32 :].view(32, 64))
    model.head.weight = model.embedding.weight
    other = TinyLM()
    other.head.weight = other.embedding.weight
    other.load_state_dict(model.state_dict())
    made, plain = trainee(model=model), trainee(model=other)
    resident = Residency(made, keep(made.model), "cpu")
    assert held_bytes(made, resident) == 0, "a tied weight is no buffer"
    want = train(plain)
    for _ in range(2):
        with resident():
            assert (
                model.up.weight.untyped_storage().data_ptr() == model.down.weight.untyped_storage().data_ptr()
            )
            assert same(train(made), want)
