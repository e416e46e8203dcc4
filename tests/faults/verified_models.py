"""Small training steps that `verify` judges while a fault is planted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fault_catalogue import Fault
from torch import nn

import fp8core
from fp8core import (
    RECIPES,
    GroupedMatmul,
    Proof,
    Recipe,
    convert_experts_to_float8,
    microbatches,
    update_scales,
)

if TYPE_CHECKING:
    from fp8core.recipe import Kernels


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 48, 64) * 0.1)
        self.multiply = GroupedMatmul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.multiply.pad(x, torch.tensor([16, 48], dtype=torch.int32))
        return rows.restore(self.multiply(rows.x, self.weight, rows.offsets))


def recipe_of(name: str, kernels: Kernels) -> Recipe:
    """The recipe, emulated where no CPU multiplies it."""
    recipe = RECIPES[name].with_kernels(kernels)
    return recipe.emulated() if name == "mxfp8" else recipe


def verdict(name: str, kernels: Kernels = "auto", seed: int = 0, writes: bool = False) -> Proof:
    """Proof of a step of two microbatches through two layers, an optimizer and an update of delayed scales.

    `writes`: weights are written through `p.data` between the two.
    """
    torch.manual_seed(seed)
    recipe = recipe_of(name, kernels)
    model: nn.Module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    model = fp8core.convert_to_float8_training(model, config=recipe, allow_no_conversion=True)
    x = torch.randn(2, 64, 64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step() -> None:
        with microbatches(model):
            for part in x:
                model(part).square().mean().backward()
                if writes:
                    for p in model.parameters():
                        p.data.mul_(0.75)
            optimizer.step()
        optimizer.zero_grad()
        update_scales(model)

    return fp8core.verify(step, model, recipe=recipe, announce=False)


def verdict_on_experts(name: str, seed: int = 0) -> Proof:
    """Proof of a step through two experts."""
    torch.manual_seed(seed)
    model = convert_experts_to_float8(nn.Sequential(Experts()), config=name)
    x = torch.randn(48, 64, requires_grad=True)
    return fp8core.verify(lambda: model(x).square().mean().backward(), model, announce=False)


def caught(fault: Fault) -> set[str]:
    """What `verify` has against a step with the fault, and not against one without; what the step itself raises counts."""
    if fault.caught_by == "experts":
        without = verdict_on_experts(fault.recipe)
        with fault.planted():
            found = verdict_on_experts(fault.recipe)
    else:
        writes = fault.caught_by == "weight_changes"
        without = verdict(fault.recipe, fault.kernels, writes=writes)
        try:
            with fault.planted():
                found = verdict(fault.recipe, fault.kernels, writes=writes)
        except ValueError as error:
            return {f"refused: {error}"}
    return set(found.problems) - set(without.problems)
