"""More deliberately wrong implementations, of whole layers: gradients, biases, sums over microbatches, experts.

As `fault_catalogue`; no training run was made with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fault_catalogue
import torch
from fault_catalogue import (
    FAULTS,
    Fault,
    Patches,
    amax,
    amax_of,
    cast_saturating,
    codes_of,
    gemm_of,
    operand_of,
)

import fp8core
import fp8core.experts.grouped
import fp8core.linear
import fp8core.plain_linear
from fp8core import E4M3FN
from fp8core.gemm.layout import Operand

BACKWARD = fp8core.plain_linear._ScaledLinear.backward
FORWARD = fp8core.linear.Float8Linear.forward
RUN = fp8core.linear.Float8Linear._run
GROUPED = fp8core.experts.grouped.scaled_grouped_mm


def backward_times(factor: float, *places: int) -> Patches:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grads = list(BACKWARD(ctx, grad))
        for place in places:
            if grads[place] is not None:
                grads[place] = factor * grads[place]
        return tuple(grads)

    return [("fp8core.plain_linear._ScaledLinear.backward", staticmethod(backward))]


def first_half(x: torch.Tensor, granularity: Any = "tensorwise", dim: int = -1) -> torch.Tensor:
    if granularity == "tensorwise":
        return amax(x[: (x.shape[0] + 1) // 2], granularity, dim)
    if granularity == "rowwise":
        return amax(x.narrow(dim, 0, (x.shape[dim] + 1) // 2), granularity, dim)
    return amax(x, granularity, dim)


def scales_changed_places(a: Any, b: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Where the shapes allow it."""
    if a.scale_inv.dim() == 2 and a.scale_inv.t().shape == b.scale_inv.shape:
        a, b = Operand(a.qdata, b.scale_inv.t()), Operand(b.qdata, a.scale_inv.t())
    return fault_catalogue.scaled_mm(a, b, *args, **kwargs)


def next_code(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    """Every hundredth code is one too large."""
    codes = cast_saturating(x, fmt)
    raw = codes.view(torch.uint8).clone(memory_format=torch.contiguous_format)
    some = torch.arange(raw.numel()).view(raw.shape) % 100 == 37
    small = (raw & 0x7F) < 0x70
    return torch.where(some & small, raw + 1, raw).view(codes.dtype)


def flushed(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    fmt = fp8core.formats.as_element_format(fmt)
    normal = 2.0 ** (-6 if fmt.short == "e4m3" else -14)
    codes = cast_saturating(x, fmt)
    return torch.where(codes.float().abs() < normal, torch.zeros_like(codes.float()), codes.float()).to(
        codes.dtype
    )


def nan_to_max(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    return cast_saturating(x.float().nan_to_num(nan=448.0), fmt)


def e4m3_gradients(
    x: torch.Tensor, cast: Any, dim: int, memory: Any = None, role: str = "input", **kwargs: Any
) -> Any:
    if role == "grad_output" and cast is not None:
        cast = dataclasses.replace(cast, format=E4M3FN)
    return fault_catalogue.cast_operand(x, cast, dim, memory, role, **kwargs)


def bias_before_descale(self: Any, x: Any, weight: torch.Tensor, bias: Any, tp: Any) -> torch.Tensor:
    y = RUN(self, x, weight, None, tp)
    if bias is None:
        return y
    scale_inv = x.detach().abs().amax() * weight.detach().abs().amax() / 448**2
    return y + (bias * scale_inv).to(y.dtype)


def sums_in_bfloat16(self: Any, x: Any) -> torch.Tensor:
    if not hasattr(self, "_rounds"):
        self._rounds = True

        def rounds(p: torch.Tensor) -> None:
            p.grad.copy_(p.grad.bfloat16())

        self.weight.register_post_accumulate_grad_hook(rounds)
    return FORWARD(self, x)


def experts_of(change: Callable[..., torch.Tensor]) -> Patches:
    return [("fp8core.experts.grouped.scaled_grouped_mm", change)]


def neighbours_weight(a: Any, b: Any, *args: Any) -> torch.Tensor:
    if b.qdata.dim() == 3:
        b = Operand(b.qdata.view(torch.uint8).roll(1, 0).view(b.qdata.dtype), b.scale_inv)
    return GROUPED(a, b, *args)


def weight_gradient_too_large(a: Any, b: Any, *args: Any) -> torch.Tensor:
    product = GROUPED(a, b, *args)
    return product if b.qdata.dim() == 3 else 1.3 * product


LAYER_FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("grad_input negated", "layer_band", "", backward_times(-1.0, 0)),
        Fault("grad_weight negated", "layer_band", "", backward_times(-1.0, 1)),
        Fault("gradients 1.3 times too large", "layer_band", "", backward_times(1.3, 0, 1)),
        Fault("gradients 1.3 times too large, rowwise", "layer_band", "", backward_times(1.3, 0, 1), "rowwise"),
        Fault("amax of the first half", "heterogeneous_blocks", "", amax_of(first_half)),
        Fault("amax of the first half of each row", "heterogeneous_blocks", "", amax_of(first_half), "rowwise"),
        Fault("scales of a and b changed places", "layer_rows", "", gemm_of(scales_changed_places), "rowwise"),
        Fault("every hundredth code one too large", "every_code", "", codes_of(next_code)),
        Fault("subnormal codes flushed", "every_code", "", codes_of(flushed)),
        Fault("NaN becomes 448", "every_code", "", codes_of(nan_to_max)),
        Fault("e4m3 gradients where e5m2 is promised", "layer_band", "", operand_of(e4m3_gradients)),
        Fault("bias added before the scales", "bias_and_sums", "",
              [("fp8core.linear.Float8Linear._run", bias_before_descale)]),
        Fault("gradients of microbatches summed in bfloat16", "bias_and_sums", "",
              [("fp8core.linear.Float8Linear.forward", sums_in_bfloat16)]),
        Fault("an expert with its neighbour's codes", "experts", "", experts_of(neighbours_weight), "rowwise"),
        Fault("experts' grad_weight 1.3 times too large", "experts", "",
              experts_of(weight_gradient_too_large), "rowwise"),
    )
}  # fmt: skip
ALL_FAULTS = FAULTS | LAYER_FAULTS
