"""The tensors of a layer as `verify` needs them: this rank's parts, in high precision, with the amaxes that their scales go by."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode

from fp8core.dtensors import is_dtensor
from fp8core.history import ROLES
from fp8core.inputs.sharded import TPLayout, cut_of
from fp8core.inputs.shared_input import CastInput, after_autocast
from fp8core.inputs.two_casts import TwoCasts
from fp8core.tensor import Float8Tensor
from fp8core.verify.oracle import Quantized, block_amax
from fp8core.verify.received import spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8core.linear import Float8Linear
    from fp8core.recipe import Cast


@contextmanager
def quietly() -> Iterator[None]:
    """Around checks: no autograd, and no mode sees them, neither ours nor the user's."""
    with torch.no_grad(), _disable_current_modes():
        yield


def keeps_results() -> bool:
    """Whether selective activation checkpointing hands out results of the first forward pass, and runs no operator."""
    return any(isinstance(mode, _CachedTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())


class Codes(Quantized):
    """A matrix that is there as codes alone; `x` is the Float8Tensor."""

    @classmethod
    def given(cls, x: Float8Tensor) -> Codes:
        """Wrap a matrix of codes."""
        empty = torch.zeros(0, dtype=torch.float64, device=x.device)
        return cls(x, None, empty, empty, (0, 0))

    def hp(self, rows: slice, columns: slice) -> torch.Tensor:
        """The tile's value, float64."""
        x = self.x
        assert isinstance(x, Float8Tensor)
        bounds = slice(*rows.indices(x.shape[0])[:2]), slice(*columns.indices(x.shape[1])[:2])
        return x.qdata[bounds].float().double() * spread(x.scale_inv, x.shape, *bounds)


def plain(x: Any) -> torch.Tensor:
    """This rank's part of a tensor, without autograd and without the wrapper that FSDP2 gathers it by."""
    x = x.detach()
    if is_dtensor(x):
        x = x.to_local()
    return getattr(x, "hp", x)


def weight_of(layer: Float8Linear) -> torch.Tensor:
    """The weight [N, K] that the layer multiplies by: a plain tensor, or the Float8Tensor that FSDP2 gathered."""
    return plain(layer.linear_weight)


def input_of(layer: Float8Linear, given: Any) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """A layer's input as matrices: (for the output GEMM, for grad_weight if that is another, why its cast is unknown).

    High precision wherever that is there, else the codes that came and the reason, which is "" otherwise.
    """
    cut = cut_of(layer.weight)
    x = given if isinstance(given, CastInput) else given.detach()
    if cut is not None and isinstance(x, torch.Tensor):
        x = cut.local_input(x, str(layer))
    if isinstance(x, TwoCasts):
        x = x.as_cast_input()
    if isinstance(x, CastInput):
        if x.codes_only:
            return x.for_output, x.for_grad_weight, "the input came in codes"
        x = x.hp.detach()
        x = x if cut is None else cut.local_input(x, str(layer))
    x = x if isinstance(x, Float8Tensor) else after_autocast(x)
    x = x.reshape(-1, x.shape[-1])
    return x, None, "the input came in codes" if isinstance(x, Float8Tensor) else ""


def quantized(
    layer: Float8Linear, x: torch.Tensor, cast: Cast | None, dim: int, role: str, cut: TPLayout | None
) -> Quantized:
    """x as the recipe casts it, with the amax that its scale must come from.

    One all-reduce where tensor parallelism cuts x and its scale spans the parts, which each rank of the group calls.
    """
    if isinstance(x, Float8Tensor):
        return Codes.given(x)
    if cast is None:
        return Quantized.of(x, None, dim)
    memory = layer.amaxes
    if cast.scaling != "dynamic" and memory is not None and role in memory.ready:
        amax = memory.in_use[ROLES.index(role)].double() * 2.0**memory.settings.margin
        return Quantized.of(x, cast, dim, amax.float().double().reshape(1, 1))
    cast = replace(cast, scaling="dynamic")
    if cast.granularity == "tensorwise" and cut is not None and role in cut.roles:
        return Quantized.of(x, cast, dim, max_over(block_amax(x, (0, 0)), cut.group))
    return Quantized.of(x, cast, dim)


def max_over(amax: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest of all ranks of a group; NaN on one is Inf on all, since gloo and NCCL differ on NaN."""
    amax = amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return amax.double()
