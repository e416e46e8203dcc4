"""The tensors of a layer as `verify` needs them: this rank's parts, in high precision, with the amaxes that their scales go by."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fp8core.arguments import is_dtensor
from fp8core.inputs.sharded import tp_layout_of
from fp8core.inputs.shared_input import CastInput, after_autocast
from fp8core.inputs.two_casts import TwoCasts
from fp8core.proof.verify.oracle import TiledOperand, block_amax
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8core.history import Amaxes
    from fp8core.inputs.sharded import TPLayout
    from fp8core.linear import Float8Linear
    from fp8core.recipe import Cast


@contextmanager
def quietly() -> Iterator[None]:
    """Around checks: no autograd, and no mode sees them, neither ours nor the user's."""
    with torch.no_grad(), _disable_current_modes():
        yield


def plain(x: Any) -> torch.Tensor:
    """This rank's part of a tensor, without autograd and without the wrapper that FSDP2 gathers it by."""
    x = x.detach()
    if is_dtensor(x):
        x = x.to_local()
    return getattr(x, "hp", x)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """All leading dimensions as one; a number as a matrix of one element."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


def input_of(layer: Float8Linear, given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's input as matrices: (for the output GEMM, for grad_weight if that is another).

    High precision wherever that is there, else the codes that came.
    """
    tp = tp_layout_of(layer.weight)
    x = given if isinstance(given, CastInput) else given.detach()
    if tp is not None and isinstance(x, torch.Tensor):
        x = tp.local_input(x, str(layer))
    if isinstance(x, TwoCasts):
        x = x.as_cast_input()
    if isinstance(x, CastInput):
        if x.codes_only:
            return x.for_output, x.for_grad_weight
        x = x.hp.detach()
        x = x if tp is None else tp.local_input(x, str(layer))
    return matrix(x if isinstance(x, Float8Tensor) else after_autocast(x)), None


def held_amax(cast: Cast, memory: Amaxes | None, role: str) -> torch.Tensor | None:
    """The amax of earlier steps that a cast's scale goes by, float64 [1, 1]; None where it goes by the tensor's own."""
    in_use = None if memory is None or cast.scaling == "dynamic" else memory.of(role)
    if memory is None or in_use is None:
        return None
    return (in_use.double() * 2.0**memory.settings.margin).reshape(1, 1)


def cast_as(
    x: torch.Tensor,
    cast: Cast | None,
    memory: Amaxes | None,
    role: str,
    tp: TPLayout | None,
    whole: torch.Tensor | None = None,
) -> TiledOperand:
    """x [lines, along] as the recipe casts it.

    One all-reduce where tensor parallelism cuts x and its scale spans the parts, which each rank of the group calls.

    Args:
        x: plain.
        cast: how; None leaves it in high precision.
        memory: amaxes of the layer.
        role: one of `fp8core.history.ROLES`.
        tp: how tensor parallelism has cut the layer.
        whole: what shares a tensorwise scale with x, if x is a part of it.
    """
    if cast is None:
        return TiledOperand(x)
    held = held_amax(cast, memory, role)
    amax = None
    if held is None and cast.granularity == "tensorwise":
        amax = block_amax(x if whole is None else whole, (0, 0))
        if tp is not None and role in tp.roles:
            amax = max_over(amax, tp.group)
    return TiledOperand.of(x, cast, amax, held)


def max_over(amax: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest of all ranks of the groups; NaN on one is Inf on all, since gloo and NCCL differ on NaN."""
    amax = amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return amax.double()
