"""Suite `recipes`: every recipe of fp8core on one layer, what it costs beside what it does to the numbers.

Forward and backward as in the suite `linear`, eager, with its checks. A recipe that this device has no kernel for
is emulated: its numbers are those of the recipe, its time is none of FP8's, and `resolved.backend` says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8core.inputs.operands import casts_route
from fp8core.recipe import RECIPES, Recipe
from harness.advise.cast_traffic import cast_bytes
from harness.store.case import Arm
from harness.suites import linear
from harness.suites.common import sizes
from harness.suites.extended import extended_table
from harness.timing.workload import ArmInfo, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from harness.store.case import Case

AXES, points, work = linear.AXES, linear.points, linear.work
ARMS = extended_table(
    {
        Arm("bf16", "eager"): ArmInfo("nn.Linear in bfloat16"),
        **{
            Arm(name, "eager"): ArmInfo(f"Float8Linear, recipe {name}", baseline="bf16_eager")
            for name in RECIPES
        },
    },
    RECIPES,
)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Sizes that no FP8 kernel takes; what only this device lacks is emulated."""
    why = linear.gemms_unsupported(case, _recipe(arm), device)
    return why if why is not None and why.kind == "shape" else None


def build(case: Case, arm: str, device: str) -> Workload:
    """The layer of the recipe, emulated where it has to be."""
    recipe = _recipe(arm)
    resolved: dict[str, object] = {"compile": "eager"}
    if recipe is not None and (lacking := linear.gemms_unsupported(case, recipe, device)):
        recipe = recipe.emulated()
        resolved["emulated"] = lacking.reason
    x, weight, grad = linear.operands(case, device)
    layer = linear.make_layer(weight, recipe)
    linear.warm_up(layer, recipe, x, grad)
    resolved["backend"] = linear.backend_of(recipe, device)
    if recipe is not None:
        resolved["casts"] = casts_route(weight, recipe)
    result = linear.workload(case, recipe, layer, (x, weight, grad), resolved)
    judge = result.check

    def check() -> Numerics:
        numerics = judge()
        cost = {"saved_bytes_per_elem": saved_bytes(layer, x) / x.numel()}
        if recipe is not None and not recipe.is_four_bit:  # for whose casts there are no kernels
            M, K, N = sizes(case)
            moved = cast_bytes(recipe, {"input": (M, K), "weight": (N, K), "grad_output": (M, N)})
            cost["cast_bytes_per_elem"] = moved / (M * K + N * K + M * N)
        return replace(numerics, values={**numerics.values, **cost})

    result.check = check
    return result


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters left out; each storage counts once."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        for part in _plain(saved):
            storage = part.untyped_storage().data_ptr()
            if storage not in parameters:
                kept[storage] = max(kept.get(storage, 0), part.numel() * part.element_size())
        return saved

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda saved: saved):
        output = layer(x)
    del output
    return sum(kept.values())


def _plain(x: Tensor) -> Iterator[Tensor]:
    """A tensor, or the tensors that a wrapper of codes and scales holds."""
    if not is_traceable_wrapper_subclass(x):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield getattr(x, name)


def _recipe(arm: str) -> Recipe | None:
    record = ARMS[arm].arm
    return RECIPES[record.recipe] if record.has_fp8 else None
