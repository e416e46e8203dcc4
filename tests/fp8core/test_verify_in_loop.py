"""`StepProof` in loops that train. Oracles: `verify` on an equal model; plain loops, for weights after the loop; planted faults."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fp8core import PrecisionSchedule, StepProof, convert_to_float8_training, update_scales, verify

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")


class Loop:
    """A loop that trains a small converted model; each turn is a step of several microbatches."""

    def __init__(self, recipe: str = "tensorwise", *, compiled: bool = False) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.model: Any = convert_to_float8_training(model, config=recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.run = torch.compile(self.model, backend="aot_eager") if compiled else self.model
        self.batches = torch.randn(8, 4, 16, 32)
        self.turn = 0

    def step(self, microbatches: int = 2) -> None:
        for batch in self.batches[self.turn][:microbatches]:
            self.run(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_scales(self.model)
        self.turn += 1

    def proved(self, **arguments: Any) -> Any:
        proof = StepProof(self.model, **arguments)
        self.step()
        while not proof.complete:
            with proof.step():
                self.step()
        return proof.conclude()


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_of_a_loop_prove_what_verify_proves(recipe: str) -> None:
    proof = Loop(recipe).proved(recipe=recipe)
    assert proof.ok, proof.line
    other = Loop(recipe)

    def again() -> None:
        other.turn = 0
        other.step()

    theirs = verify(again, other.model, recipe=recipe, announce=False)
    assert theirs.ok, theirs.line
    assert (proof.counted, proof.predicted) == (theirs.counted, theirs.predicted)
    assert proof.counted > 0
    assert [layer.fqn for layer in proof.layers] == [layer.fqn for layer in theirs.layers]
    assert proof.matmuls.fp8_share == theirs.matmuls.fp8_share


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_loop_trains_as_without_the_proof(recipe: str) -> None:
    """Eager loops: bit for bit."""
    watched, plain = Loop(recipe), Loop(recipe)
    proof = StepProof(watched.model)
    for _ in range(4):
        with nullcontext() if proof.complete else proof.step():
            watched.step()
        plain.step()
    for mine, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_compiled_loop_is_proved_in_eager_mode_and_counted_as_it_runs() -> None:
    proof = Loop(compiled=True).proved()
    assert proof.ok, proof.line
    assert proof.compiled
    assert proof.line.startswith("FP8 verified in eager mode")


@pytest.mark.parametrize(
    ("runs", "held"), [("tensorwise", "keep_bf16"), ("tensorwise", "keep_bf16@2"), ("rowwise", "")]
)
def test_what_does_not_run_the_recipe_is_not_proved(runs: str, held: str) -> None:
    loop = Loop(runs)
    PrecisionSchedule.parse(held).apply(loop.model, 0, 1)
    proof = loop.proved(recipe="tensorwise")
    assert not proof.ok
    assert not proof.line.startswith("FP8 verified")


@pytest.mark.parametrize(
    ("held", "second", "said"),
    [("keep_bf16", 2, "no FP8 GEMM ran"), ("", 3, "FP8 GEMMs ran in a step where")],
)
def test_a_second_step_of_another_kind_is_a_problem(held: str, second: int, said: str) -> None:
    """The model is switched between the two steps, or they are of other lengths."""
    loop = Loop()
    proof = StepProof(loop.model)
    with proof.step():
        loop.step(2)
    PrecisionSchedule.parse(held).apply(loop.model, 0, 1)
    with proof.step():
        loop.step(second)
    assert any(said in problem for problem in proof.conclude().problems)


def test_fewer_than_two_steps_prove_nothing_and_a_third_is_refused() -> None:
    loop = Loop()
    proof = StepProof(loop.model)
    assert not proof.conclude().ok
    proof = StepProof(loop.model)
    with proof.step():
        loop.step()
    assert "1 of the 2 steps that a proof needs were seen" in proof.conclude().problems
    with proof.step():
        loop.step()
    with pytest.raises(RuntimeError, match="another StepProof"), proof.step():
        pass


def test_a_step_that_raises_is_none_of_the_two() -> None:
    loop = Loop()
    proof = StepProof(loop.model)

    def fails() -> None:
        loop.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), proof.step():
        fails()
    assert not proof.complete
    while not proof.complete:
        with proof.step():
            loop.step()
    assert proof.conclude().ok, "what the broken step showed is forgotten"
    assert not any(module._forward_hooks for module in loop.model.modules())
