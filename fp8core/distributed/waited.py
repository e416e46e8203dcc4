"""Outputs of collectives that a compiled module reads: waited for first.

A reduce-scatter in eager mode returns an `AsyncCollectiveTensor`, which waits at its first use. If that use is a
compiled module, AOTAutograd (torch 2.13, after pytorch #179849) returns no gradient for it: the backward pass of
whatever made it gets None, and fails with "'Tensor' object has no attribute '_local_tensor'". So a style that scatters an
output waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class WaitedRowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` of an embedding or a high-precision layer whose scattered output a compiled module reads.

    Arguments, shapes and values are those of `RowwiseParallel`; the output has arrived when the module returns.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:
        return waited(
            RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        )


def waited(x: torch.Tensor) -> torch.Tensor:
    """x, once the collective that makes it is done; gradients pass through."""
    if torch.compiler.is_compiling() or not isinstance(x, AsyncCollectiveTensor):
        return x
    arrived: torch.Tensor = _Wait.apply(x)
    return arrived


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> torch.Tensor:
        arrived: torch.Tensor = x.trigger_wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def lost_gradient(model: nn.Module, styled: Iterable[tuple[str, object]]) -> str:
    """Why a model with compiled modules would lose gradients under (module name, style) pairs; "" if it would not."""
    compiled = [name for name, module in model.named_modules() if _is_compiled(module)]
    for name, style in styled:
        within = any(not outer or name == outer or name.startswith(f"{outer}.") for outer in compiled)
        if (
            compiled
            and not within
            and type(style) is RowwiseParallel
            and style.use_local_output
            and isinstance(style.output_layouts[0], Shard)
        ):
            return (
                f"{name}: RowwiseParallel(output_layouts={style.output_layouts[0]}) returns a tensor that is still under way, "
                f"of which compiled modules ({', '.join(compiled[:3])}) return no gradient; take "
                "fp8core.WaitedRowwiseParallel with the same arguments"
            )
    return ""


def _is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or what `torch.compile(module)` returns, which holds the module as `_orig_mod`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
