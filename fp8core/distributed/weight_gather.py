"""How FSDP2 gathers a layer's weight, in FP8 or in high precision, and why in high precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core.distributed.fsdp_state import local_of
from fp8core.distributed.weight_scales import known_of, weight_cast
from fp8core.linear import Float8Linear
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from torch import nn

    from fp8core.recipe import Recipe

NOT_ASKED = "high precision: enable_fsdp_float8_all_gather is off"
NOT_CONVERTED = "high precision: the layer is not converted"
NOTE = "_fp8core_not_gathered_in_fp8"  # attribute of a Float8Linear whose weight can't be: the reason


def recipe_reason(recipe: Recipe) -> str:
    """Why a recipe's weights can't be gathered as FP8 codes; "" if they can."""
    first, second = recipe.output.b, recipe.grad_input.b
    if first is None or second is None:
        held = [name for name in ("output", "grad_input") if not recipe.gemms[name].is_fp8]
        return f"GEMM {' and '.join(held)} reads the weight in high precision"
    if first != second:
        return f"the output GEMM reads the weight as {first}, the grad_input GEMM as {second}"
    if not first.axis_free:
        return f"{first.granularity} codes differ along the two axes over which the weight is contracted"
    return ""


def high_precision_reason(layer: Float8Linear) -> str:
    """Why FSDP2 gathers a layer's weight in high precision; "" if it gathers codes."""
    if not layer.recipe.fp8_all_gather:
        return NOT_ASKED
    if reason := recipe_reason(layer.recipe):
        return reason
    if layer.is_transposed:
        return "its weight lies as [in, out]"
    if noted := getattr(layer, NOTE, ""):
        return str(noted)
    if known_of(layer) is None:
        return (
            "convert_to_float8_training did not make it, or it came from a pickle: convert the model (again)"
        )
    if weight_cast(layer) is None:
        return "its weight is tensor-parallel, and a rank's blocks are a part of all"
    local = local_of(layer.weight)
    if (
        local is not None
        and not hasattr(local, "fsdp_pre_all_gather")
        and not isinstance(local, Float8Tensor)
    ):
        return "its weight was replaced after conversion"
    return ""


def weight_gather_precision(layer: nn.Module) -> str:
    """ "fp8", or "high precision: " and why: how FSDP2 gathers the weight of a Linear where it shards it."""
    if not isinstance(layer, Float8Linear):
        return NOT_CONVERTED
    if not layer.recipe.fp8_all_gather:
        return NOT_ASKED
    reason = high_precision_reason(layer)
    return f"high precision: {reason}" if reason else "fp8"
