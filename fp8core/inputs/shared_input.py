"""An input that several layers share, cast once for all of them.

    shared = cast_input(x, attention.q, attention.k, attention.v)
    q, k, v = attention.q(shared), attention.k(shared), attention.v(shared)

`fp8core.producers` makes the same `CastInput` where a norm or an activation writes the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from fp8core.arguments import autocast_enabled, check_type
from fp8core.history import amaxes_of_pass
from fp8core.inputs.operands import cast_both, cast_one
from fp8core.inputs.sharded import AmaxRequest, shared_amaxes, tp_layout_of
from fp8core.scaling import check_hp

if TYPE_CHECKING:
    from fp8core.history import AmaxMemory
    from fp8core.recipe import Cast, Recipe

Casts = tuple["Cast | None", "Cast | None"]  # of the input: for the output, and for the grad_weight GEMM


class Reader(Protocol):
    """What is asked of a layer that reads a shared input: of `fp8core.Float8Linear`."""

    in_features: int
    out_features: int
    recipe: Recipe
    amaxes: AmaxMemory | None

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]; whether it trains decides what is cast."""
        ...


class CastInput(NamedTuple):
    """A tensor and its casts, to be given to several Float8Linear in its place; made by `cast_input`.

    Attributes:
        hp: the tensor itself, [..., K], after autocast; gradients flow through it.
        for_output: its tokens [M, K] as operand of the output GEMM.
        for_grad_weight: as operand of grad_weight; None if no layer needs it.
        casts: what the two were cast with.
        codes_only: hp has shape, dtype and a place in the graph of autograd, but no values: codes are what was gathered.
    """

    hp: torch.Tensor
    for_output: torch.Tensor
    for_grad_weight: torch.Tensor | None
    casts: Casts
    codes_only: bool = False


def cast_input(x: torch.Tensor, *layers: Reader) -> CastInput:
    """Casts a tensor once for all layers that read it.

        shared = cast_input(x, attention.q, attention.k, attention.v)
        q, k, v = attention.q(shared), attention.k(shared), attention.v(shared)

    Results and gradients equal those of calling each layer on x, bit for bit.

    Args:
        x: float32, bfloat16 or float16, [..., K]; converted first under autocast.
        layers: at least one; their recipes must cast the input alike. Delayed scaling takes the first one's
            amaxes and, where gradients are enabled, records what it saw in all.

    Raises:
        ValueError: no layer, layers whose recipes cast the input differently, or another last dimension than theirs.
        TypeError: x is no tensor of these dtypes, or a layer no Float8Linear.
    """
    check_type("input", x, torch.Tensor, "cast_input(x, *layers)")
    casts = shared_casts(*layers)
    if not any(layer.recipe.fp8_gemms for layer in layers):
        return CastInput(x, x, None, casts)  # nn.Linear's own way, autocast included
    x = after_autocast(x)
    check_hp(x, "input")
    return cast_known(x, None, casts, *layers)


def shared_casts(*layers: Reader) -> Casts:
    """How these layers cast the input that they share: for the output, and for the grad_weight GEMM.

    Raises:
        ValueError, TypeError: as `cast_input`, of the layers.
    """
    if not layers:
        raise ValueError("cast_input takes the layers that will read the tensor; got none")
    for layer in layers:
        if not hasattr(layer, "recipe"):
            raise TypeError(
                f"a layer is a {type(layer).__name__}; expected Float8Linear: convert_to_float8_training makes it one, and "
                "fp8core.audit(model) says why it did not"
            )
    casts = input_casts(layers[0].recipe)
    for layer in layers[1:]:
        if input_casts(layer.recipe) != casts:
            raise ValueError(
                f"recipes {layers[0].recipe} and {layer.recipe} cast their input differently; cast it for each"
            )
    return casts


def reads_for_grad_weight(*layers: Reader) -> bool:
    """Whether a backward pass through some of these layers will want the input again."""
    return torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)


def cast_known(x: torch.Tensor, amax: torch.Tensor | None, casts: Casts, *layers: Reader) -> CastInput:
    """`cast_input` of a tensor whose amax the producer has found already (float32, 0-dimensional), or None."""
    tp = tp_layout_of(layers[0].weight)
    part = x if tp is None else tp.local_input(x.detach(), str(layers[0]))
    for layer in layers:
        K = layer.in_features if tp is None else tp.local_features(layer.in_features, layer.out_features)[0]
        if part.dim() == 0 or part.shape[-1] != K:
            raise ValueError(f"input has shape {list(part.shape)}; expected [..., {K}] for {layer}")
    flat = part.detach().reshape(part.shape[:-1].numel() if part.shape[-1] == 0 else -1, part.shape[-1])
    gradients = torch.is_grad_enabled()
    recipe = layers[0].recipe
    if recipe.is_four_bit:  # each layer casts anew
        return CastInput(x, x, None, casts)
    memory = amaxes_of_pass(layers[0].amaxes, gradients)
    kernels = recipe.kernels
    (amax,) = shared_amaxes(tp, recipe, memory, AmaxRequest(flat, "input", casts, amax))
    trains = reads_for_grad_weight(*layers)
    with torch.no_grad():
        if trains:
            lp, lp_gw = cast_both(flat, *casts, memory, "input", kernels=kernels, amax=amax)
        else:
            lp, lp_gw = cast_one(flat, casts[0], 1, memory, "input", kernels=kernels, amax=amax), None
        if gradients:
            share_amax(*layers)
    return CastInput(x, lp, lp_gw, casts)


def share_amax(*layers: Reader) -> None:
    """Tells all layers' memories what amax of their shared input the first one's has seen."""
    first = layers[0].amaxes
    if first is not None:
        for layer in layers[1:]:
            assert layer.amaxes is not None
            layer.amaxes.record("input", first.pending[0])


def input_casts(recipe: Recipe) -> Casts:
    """The input's casts, in the output and in the grad_weight GEMM."""
    return recipe.output.a, recipe.grad_weight.b


def after_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of autocast, if that is on."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if autocast_enabled(x) else x
