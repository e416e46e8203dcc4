"""What the casts of each layer do to its tensors at one step; `harness/judge/diagnosis/casts.py` has the limits.

A diagnosis runs the model once more, eagerly, on the step's batch, with hooks that come and go with it, and casts what
they saw as the layer's recipe does. Nothing of it reaches the training: see `untouched`.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8core import CastInput, Float8Linear, Float8Tensor
from fp8core.history import AmaxMemory
from fp8core.inputs.operands import cast_one
from fp8core.scaling import amax, broadcast_block_scales
from harness.timing import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8core.recipe import Cast, Recipe
    from harness.training.setup import Setup

Figures = dict[tuple[str, str], float]  # (metric, "layer:role") -> value


def diagnose(model: nn.Module, setup: Setup, batch: tuple[Tensor, ...], device: str) -> Figures:
    """Figures of every Float8Linear's input, weight and output gradient, before their casts.

    Args:
        model: converted or not; only Float8Linear are looked at.
        setup: says whether the model runs under autocast.
        batch: what the model takes; its loss is the one whose gradients are looked at.
        device: where both lie.

    Returns:
        amax of each tensor; of those that the recipe in force casts to eight bits also scale_log2, sqnr_db, underflow_frac,
        saturated_frac and subnormal_frac, as cast for the first GEMM that takes them.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    if not layers:
        return {}
    seen: dict[tuple[str, str], Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(functools.partial(_keep, seen, name)).remove)
        autocast = setup.compute == "bf16_autocast"
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=autocast):
            model(*batch).backward()
        figures: Figures = {}
        with torch.no_grad():
            for name, layer in layers.items():
                seen[name, "weight"] = layer.weight.detach()
                for role, cast in _casts(layer.recipe).items():
                    if (name, role) in seen:
                        part = f"{name}:{role}"
                        for metric, value in _figures(seen[name, role], cast, layer.amaxes, role).items():
                            figures[metric, part] = value
    return figures


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The block may change the model; training continues as if it had not run.

    Put back are the gradients, the modes of the modules, all buffers (what delayed scaling has seen and uses among
    them), and the state of the random number generators. Weights and optimizer are the block's own affair.
    """
    parameters, modules = list(model.parameters()), list(model.modules())
    gradients, modes = [p.grad for p in parameters], [m.training for m in modules]
    memories = [m for m in modules if isinstance(m, AmaxMemory)]
    known = [(m.ready, m.updates) for m in memories]
    buffers = [*model.buffers(), *(m.pending for m in memories)]
    values = [b.clone() for b in buffers]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for memory, (ready, updates) in zip(memories, known, strict=True):
            memory.ready, memory.updates = ready, updates
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _keep(
    seen: dict[tuple[str, str], Tensor], name: str, layer: nn.Module, args: tuple[Any, ...], output: Tensor
) -> None:
    def keep(role: str, x: Tensor) -> None:
        seen[name, role] = x.detach().flatten(0, -2)

    keep("input", args[0].hp if isinstance(args[0], CastInput) else args[0])
    if output.requires_grad:
        output.register_hook(functools.partial(keep, "grad_output"))


def _casts(recipe: Recipe) -> dict[str, Cast | None]:
    """How each role is cast for the first GEMM that casts it."""
    return {
        "input": recipe.output.a or recipe.grad_weight.b,
        "weight": recipe.output.b or recipe.grad_input.b,
        "grad_output": recipe.grad_input.a or recipe.grad_weight.a,
    }


def _figures(x: Tensor, cast: Cast | None, memory: AmaxMemory | None, role: str) -> dict[str, float]:
    if x.numel() == 0:
        return {}
    values = {"amax": float(amax(x))}
    if cast is None or cast.is_four_bit:
        return values
    lp = cast_one(x, cast, 1, memory, role)
    assert isinstance(lp, Float8Tensor)
    scale_inv = broadcast_block_scales(lp.scale_inv, x.shape)
    magnitude = lp.qdata.float().abs()
    subnormal = (magnitude > 0) & (magnitude < cast.format.min_normal)
    return values | {
        "scale_log2": -float(lp.scale_inv.float().log2().median()),
        "sqnr_db": metrics.sqnr_db(lp.dequantize(torch.float32), x),
        "underflow_frac": metrics.underflow_frac(lp.qdata, x),
        "saturated_frac": metrics.saturated_frac(
            x.double() / scale_inv.double(), cast.format.overflow_threshold
        ),
        "subnormal_frac": float(subnormal.double().mean()),
    }
