"""What a Float8Linear refuses before anything runs: GEMMs that the hardware cannot do, and casts of another recipe."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fp8core.gemm import backend_named
from fp8core.gemm.layout import MULTIPLE
from fp8core.inputs.operands import serves_both
from fp8core.inputs.shared_input import input_casts
from fp8core.scaling import MX_BLOCK

if TYPE_CHECKING:
    from fp8core.recipe import Recipe
    from fp8core.tensor import Float8Tensor


def gemms_reason(
    recipe: Recipe,
    flat: torch.Tensor,
    weight: torch.Tensor,
    fqn: str = "",
    shape: torch.Size | None = None,
) -> tuple[str, bool]:
    """Why the hardware cannot do the GEMMs that a call leads to; "" if it can. And whether it is for the number of tokens alone.

    Args:
        recipe: the layer's.
        flat: the input [M, K]; grad_input runs if it requires a gradient.
        weight: [N, K]; grad_weight runs if it requires a gradient.
        fqn: the layer's name, if it has one.
        shape: of the input before its leading dimensions became tokens.

    Returns:
        The GEMM, the layer, the size at fault and the ways out.
    """
    backend = backend_named(recipe.backend)
    if recipe.pad_inner_dim or not (backend.is_fp8 or recipe.is_four_bit):
        return "", False
    M, (N, K) = flat.shape[0], weight.shape
    device = weight.device
    trains = torch.is_grad_enabled()
    for name, will_run, size in (
        ("output", True, (M, K, N)),
        ("grad_input", trains and flat.requires_grad, (M, N, K)),
        ("grad_weight", trains and weight.requires_grad, (N, M, K)),
    ):
        gemm = recipe.gemms[name]
        if not will_run or gemm.a is None or gemm.b is None:
            continue
        formats = gemm.a.format, gemm.b.format
        out_dtype = torch.bfloat16 if gemm.granularity in backend.bf16_only else flat.dtype
        lacking = backend.granularity_reason(device, gemm.granularity, recipe.nearest)
        reason = lacking or backend.shape_reason(*size, *formats, gemm.granularity, out_dtype)
        if reason is not None:
            tokens = f" with {M} tokens" if name == "grad_weight" else ""
            is_for_tokens = bool(tokens) and not (
                lacking or backend.shape_reason(N, 0, K, *formats, gemm.granularity, out_dtype)
            )
            if fqn:
                reason += f"; or leave the layer out, module_filter_fn=lambda module, fqn: fqn != {fqn!r}"
            if is_for_tokens:
                reason += (
                    "; or convert_to_float8_training(..., ragged='bf16') runs such calls in high precision"
                    + ", ragged='pad' fills them up" * (not recipe.is_four_bit)
                )
                if shape is not None and len(shape) > 2:
                    block = MX_BLOCK if gemm.is_four_bit and gemm.granularity == "1x32" else MULTIPLE
                    length, step = int(shape[-2]), math.lcm(int(shape[-2]), block) // int(shape[-2])
                    sizes = " x ".join(map(str, shape[:-1]))
                    tokens += f" ({sizes})"
                    reason += f"; or sequences of {-(-length // block) * block} for {length}, or a multiple of {step} of them"
            layer = f"{fqn!r} " if fqn else ""
            return f"GEMM {name} of {layer}Float8Linear({K}, {N}){tokens}: {reason}", is_for_tokens
    return "", False


def weight_reason(recipe: Recipe, K: int, N: int) -> str:
    """Why the hardware multiplies no tokens at all by a weight [N, K]; "" if it does."""
    shape_reason = backend_named(recipe.backend).shape_reason
    for gemm, k, n in ((recipe.output, K, N), (recipe.grad_input, N, K)):
        if gemm.a is not None and gemm.b is not None and not recipe.pad_inner_dim:
            reason = shape_reason(0, k, n, gemm.a.format, gemm.b.format, gemm.granularity)
            if reason:
                return reason
    return ""


def check_weight(weight: torch.Tensor, trains: bool, layer: str) -> None:
    """Refuse a weight that no cast or no training takes.

    Raises:
        RuntimeError: it was made in inference mode and is to be trained.
        TypeError: it is torchao's, which `quantize_` put there.
    """
    if trains and weight.requires_grad and weight.is_inference():
        raise RuntimeError(
            f"the weight of {layer} was made in torch.inference_mode(), where autograd can't train it; make the model "
            "outside of it"
        )
    if type(weight).__module__.startswith("torchao."):
        raise TypeError(
            f"torchao made the weight of {layer} a {type(weight).__name__}, which no FP8 recipe casts; call "
            "fp8core.convert_to_high_precision(model) first, then torchao's quantize_"
        )


def check_codes(recipe: Recipe, codes: Float8Tensor, role: str, again: bool) -> None:
    """Refuse a Float8Tensor as input or weight unless it is what the recipe would have made, for each GEMM that will read it.

    Raises:
        ValueError: names the cast that came and the one that the recipe wants.
    """
    later, axis, first, second = (
        ("grad_weight", "the tokens", *input_casts(recipe))
        if role == "input"
        else ("grad_input", "out_features", recipe.output.b, recipe.grad_input.b)
    )
    received = f"{codes.format.short}_{codes.granularity}"
    if first is None or (codes.format, codes.granularity) != (first.format, first.granularity):
        raise ValueError(f"{role} is a Float8Tensor {received}; recipe {recipe} wants {first}")
    if again and not serves_both(first, second):
        raise ValueError(
            f"{role} is a Float8Tensor {received}, but {later} wants {second} along {axis}, which codes can't "
            "give; pass the tensor itself, or of an input fp8core.cast_input(x, layer)"
        )
