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

from fp8core.operands import casts_route
from fp8core.recipe import RECIPES, Cast, Recipe
from harness.suites import linear
from harness.suites.oracle import BLOCKS
from harness.workload import ArmInfo, Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from harness.case import Case

AXES = linear.AXES
ARMS: Mapping[str, ArmInfo] = {
    "bf16_eager": ArmInfo("nn.Linear in bfloat16"),
    **{f"{name}_eager": ArmInfo(f"Float8Linear, recipe {name}", baseline="bf16_eager") for name in RECIPES},
}
points = linear.points
work = linear.work

# The tensors of a layer, and which operand of which GEMM each of them is.
TENSORS = {
    "input": (("output", "a"), ("grad_weight", "b")),
    "weight": (("output", "b"), ("grad_input", "b")),
    "grad_output": (("grad_input", "a"), ("grad_weight", "a")),
}


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Sizes that no FP8 kernel takes; what only this device lacks is emulated."""
    why = linear.gemms_unsupported(case, _recipe(arm), device)
    return why if why is not None and why.kind == "shape" else None


def build(case: Case, arm: str, device: str) -> Workload:
    """The layer of the recipe, emulated where it has to be."""
    recipe = _recipe(arm)
    lacking = linear.gemms_unsupported(case, recipe, device)
    if recipe is not None and lacking is not None:
        recipe = recipe.emulated()
    x, weight, grad = linear.operands(case, device)
    layer = linear.make_layer(weight, recipe)
    linear.warm_up(layer, recipe, x, grad)
    resolved: dict[str, object] = {
        "timed": "forward and backward of one linear layer, casts included",
        "module": type(layer).__name__,
        "recipe": recipe.name if recipe else "bf16",
        "backend": linear.backend_of(recipe, device),
        "compile": "eager",
    }
    if recipe is not None:
        resolved["casts"] = casts_route(weight, recipe)
    if lacking is not None:
        resolved["emulated"] = lacking.reason
    result = linear.workload(case, recipe, linear.step_of(layer), (x, weight, grad), resolved)
    judge = result.check

    def check() -> Numerics:
        numerics = judge()
        cost = {"saved_bytes_per_elem": saved_bytes(layer, x) / x.numel()}
        if recipe is not None:
            cost["cast_bytes_per_elem"] = cast_bytes(recipe, _sizes(case)) / sum(
                rows * columns for rows, columns in _sizes(case).values()
            )
        return replace(numerics, values={**numerics.values, **cost})

    result.check = check
    return result


def cast_bytes(recipe: Recipe, sizes: Mapping[str, tuple[int, int]]) -> float:
    """What the casts of a layer move if fused kernels make them (`fp8core.kernels.traffic`), for bfloat16 tensors.

    Each element of a tensor is read once to be cast, and once more before that where its scale depends on elements
    that are not at hand: those of the whole tensor, or of rows and columns at once. One byte is written for each
    GEMM that takes the tensor in FP8, since the two contract it along different axes; scales of blocks are written
    too, those of rows and of whole tensors are left out. Two casts that differ are made one by one, and the one for
    the GEMM that contracts rows then writes codes for both, of which one is dropped.

    Args:
        recipe: the casts of the three GEMMs.
        sizes: rows and columns of each of `TENSORS`.
    """
    total = 0.0
    for tensor, places in TENSORS.items():
        along_1, along_0 = (getattr(recipe.gemms[name], side) for name, side in places)
        if along_1 == along_0 or along_1 is None or along_0 is None:
            each = (
                0.0
                if along_1 is None and along_0 is None
                else _bytes(along_1 or along_0, along_0 is not None)
            )
        else:
            each = _bytes(along_1, False) + _bytes(along_0, True)
        rows, columns = sizes[tensor]
        total += rows * columns * each
    return total


def one_layout_bytes(cast: Cast) -> float:
    """What a cast of one element moves where only the GEMM that contracts columns takes it."""
    return _bytes(cast, False)


def _bytes(cast: Cast, both: bool) -> float:
    """Of an element: reads, codes of one or both layouts, and their scales."""
    first = cast.scaling == "dynamic" and (
        cast.granularity == "tensorwise" or (cast.granularity == "rowwise" and both)
    )
    layouts = 1 + (both or cast.granularity == "128x128")  # for which there is one kernel
    scales = 1 if cast.granularity == "128x128" else layouts
    return 2 * (1 + first) + layouts + scales * _scale_bytes(cast)


def _scale_bytes(cast: Cast) -> float:
    """Bytes of block scales for an element: float32, or one byte for MX."""
    across, along = BLOCKS.get(cast.granularity, (0, 0))
    size = 1 if cast.granularity == "1x32" else 4
    return size / (across * along) if across else 0.0


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
    name = arm.removesuffix("_eager")
    return None if name == "bf16" else RECIPES[name]


def _sizes(case: Case) -> dict[str, tuple[int, int]]:
    M, K, N = case.integer("M"), case.integer("K"), case.integer("N")
    return {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
