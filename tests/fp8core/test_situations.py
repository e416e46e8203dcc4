"""Recipe x situation: what a loop, a loader or a wrapper does around a model changes nothing that FP8 computes or remembers.

Oracle of the table: the same training without the situation, bitwise: losses, weights and amaxes. One step is skipped in
all of them, as a loss scaler does.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from recipes import on_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8core import (
    RECIPES,
    Float8Linear,
    Recipe,
    amax_state_dict,
    convert_to_float8_training,
    load_amax_state_dict,
    microbatches,
    update_scales,
)

STEPS, SKIPPED = 4, 1
Make = Callable[[Recipe], nn.Module]
NOT_ASKED = contextlib.nullcontext


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))


def made(recipe: Recipe) -> nn.Module:
    return convert_to_float8_training(plain(), config=recipe)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@dataclass(frozen=True)
class Situation:
    """Each part is what the loop has in its place."""

    make: Make = made
    around: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] = lambda model: NOT_ASKED()
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor] = step
    after: Callable[[nn.Module], Any] = lambda model: None


def trained(recipe: Recipe, situation: Situation) -> list[torch.Tensor]:
    model = situation.make(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(1)
    losses = []
    with situation.around(model):
        for number in range(STEPS):
            optimizer.zero_grad()
            losses += [
                situation.step(model, torch.randn(16, 32, generator=data).requires_grad_()) for _ in range(2)
            ]
            situation.after(model)
            if number != SKIPPED:
                optimizer.step()
            update_scales(model)
    return [*losses, *(p.detach() for p in model.parameters()), *amax_state_dict(model).values()]


def made_on_meta(fill: float) -> Make:
    """torchtitan's way: `to_empty` leaves what the heap holds, and the model's own initialisation sees parameters only."""

    def make(recipe: Recipe) -> nn.Module:
        with torch.device("meta"):
            model = convert_to_float8_training(plain(), config=recipe)
        model._apply(lambda t: torch.full_like(t, fill, device="cpu"))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), plain().parameters(), strict=True):
                parameter.copy_(value)
        return model

    return make


@torch.inference_mode()
def made_in_inference_mode(recipe: Recipe) -> nn.Module:
    with torch.inference_mode(False):
        model = plain()
    return convert_to_float8_training(model, config=recipe)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again: nn.Module = torch.load(file, weights_only=False)
    return again


def validated(mode: Callable[[], Any]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def validate_and_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with mode():
            model(1000 * x)
        return step(model, x)

    return validate_and_step


def recomputed(reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda model, x: step(
        lambda x: checkpoint(model, x, use_reentrant=reentrant),  # type: ignore[arg-type]
        x,
    )


def copied_and_used(copy_of: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    """The copy trains in a block of its own, and keeps nothing of the original's."""

    def use(model: nn.Module) -> None:
        again = copy_of(model)
        with microbatches(again):
            step(again, torch.randn(16, 32, generator=torch.Generator().manual_seed(2)))
        assert all(m.weight_cache is None for m in again.modules() if isinstance(m, Float8Linear))

    return use


def reloaded(model: nn.Module) -> None:
    """Averaged weights in and out, as a checkpoint takes them."""
    state, amaxes = (
        {k: v.clone() for k, v in of.items()} for of in (model.state_dict(), amax_state_dict(model))
    )
    pending = [m.amaxes.pending.clone() for m in model.modules() if getattr(m, "amaxes", None) is not None]
    model.load_state_dict({k: 2 * v for k, v in state.items()})
    model.load_state_dict(state)
    load_amax_state_dict(model, amaxes)
    for m in model.modules():
        if getattr(m, "amaxes", None) is not None:
            m.amaxes.pending.copy_(pending.pop(0))


SITUATIONS = {
    "made on meta, heap of 1e8": Situation(make=made_on_meta(1e8)),
    "made on meta, heap of NaN": Situation(make=made_on_meta(torch.nan)),
    "converted in inference_mode": Situation(make=made_in_inference_mode),
    "FP8 all-gather, not sharded": Situation(
        make=lambda recipe: made(recipe.with_fp8_all_gather()), step=validated(torch.inference_mode)
    ),
    "deepcopy": Situation(make=lambda recipe: copy.deepcopy(made(recipe))),
    "pickle": Situation(make=lambda recipe: pickled(made(recipe))),
    "pickle, FP8 all-gather": Situation(make=lambda recipe: pickled(made(recipe.with_fp8_all_gather()))),
    "wrapped": Situation(make=lambda recipe: nn.Sequential(made(recipe))),
    "validation, no_grad": Situation(step=validated(torch.no_grad)),
    "validation, inference_mode": Situation(step=validated(torch.inference_mode)),
    "checkpointing": Situation(step=recomputed(False)),
    "checkpointing, reentrant": Situation(step=recomputed(True)),
    "microbatches": Situation(around=microbatches),
    "microbatches, checkpointing": Situation(around=microbatches, step=recomputed(False)),
    "microbatches, no_grad": Situation(around=microbatches, step=validated(torch.no_grad)),
    "microbatches, inference_mode": Situation(around=microbatches, step=validated(torch.inference_mode)),
    "microbatches, deepcopy": Situation(around=microbatches, after=copied_and_used(copy.deepcopy)),
    "microbatches, copy": Situation(
        around=microbatches, after=lambda m: setattr(m, "kept", [copy.copy(c) for c in m])
    ),
    "microbatches, torch.save": Situation(around=microbatches, after=copied_and_used(pickled)),
}


@pytest.mark.filterwarnings("ignore:load_state_dict")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_situation_changes_nothing(name: str, situation: str) -> None:
    recipe = on_cpu(name)
    expected, found = trained(recipe, Situation()), trained(recipe, SITUATIONS[situation])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
