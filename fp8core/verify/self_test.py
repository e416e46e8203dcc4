"""Each recipe that a model runs, tested with hard operands: `fp8core.verify.probe` under the checks of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.scaling import HP_DTYPES
from fp8core.verify.probe import LinearProbe, probe_experts
from fp8core.verify.state import restored_randomness
from fp8core.verify.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Recipe


@dataclass
class Tested:
    """What the tests of a model's recipes found."""

    recipes: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)


def tested_recipes(watch: Watch, model: nn.Module) -> Tested:
    """Tests each kind of converted layer of a watched model once."""
    kinds: dict[tuple[Recipe, torch.dtype, torch.device, bool], None] = {}
    for _, layer in watch.layers:
        if layer.recipe.fp8_gemms:
            kinds[layer.recipe, _hp(layer.weight.dtype), layer.weight.device, False] = None
    for _, product in watch.products:
        weight = next((p for p in model.parameters() if p.dim() == 3), None)
        if product.recipe is not None and product.recipe.fp8_gemms and weight is not None:
            kinds[product.recipe, _hp(weight.dtype), weight.device, True] = None
    tested = Tested(tuple(dict.fromkeys(str(recipe) for recipe, *_ in kinds)))
    for recipe, dtype, device, of_experts in kinds:
        if device.type == "meta":
            tested.not_checked.append(f"recipe {recipe}: its layers are on meta")
            continue
        with restored_randomness([device]):
            found = _experts(recipe, dtype, device) if of_experts else _linear(recipe, dtype, device)
        what = "experts" if of_experts else "a layer"
        tested.problems += [f"recipe {recipe}, tested on {what} of our own: {fault}" for fault in found[:3]]
    return tested


def _hp(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in HP_DTYPES else torch.bfloat16


def _linear(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> list[str]:
    probe = LinearProbe(recipe, dtype, device)
    model = nn.ModuleList([probe.layer])
    faults = _faults_of(model, probe.step) + probe.faults
    return faults or [f"with NaN and Inf: {fault}" for fault in _faults_of(model, probe.spoilt)]


def _experts(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> list[str]:
    product, step = probe_experts(recipe, dtype, device)
    return _faults_of(nn.ModuleList([product]), step)


def _faults_of(model: nn.Module, step: Callable[[], Any]) -> list[str]:
    watch = Watch(model)
    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), watch:
        step()
    faults = [fault for proof in watch.proofs() for fault in proof.faults]
    proofs = [proof for proof in watch.found.values() if proof.recipe]
    idle = [name for proof in proofs for name, gemm in proof.gemms.items() if not gemm.calls]
    return faults + [f"{name} was never compared" for name in idle]
