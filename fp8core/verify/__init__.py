"""verify: a proof, read by machines, that a training step runs in FP8 and computes what its recipe says.

The step runs three times and leaves no trace (`fp8core.verify.state`). The first time, in eager mode whatever was
compiled, hooks and a dispatch mode see each call of each Float8Linear and of each product of experts:

    operands   codes and scales that each FP8 GEMM received, against an independent cast      `.received`, `.oracle`
    products   output, grad_input and grad_weight, against products of the same operands in float64, in high
               precision and cast independently: the SQNR must be the one that these operands imply    `.products`
    sums       gradients that add up over microbatches                                              `.accumulation`

The second time it runs as is, so that what is compiled compiles; the third time a profiler counts the FP8 GEMMs that
ran. What must follow, of each call:

    output        once; again for each recomputation in a backward pass
    grad_input    where the input needs a gradient
    grad_weight   where the weight does

each only if the recipe casts it. Last, each recipe that the model runs is tested with operands that hold what the step
may not: NaN, subnormal codes, ties, a largest element that is negative (`.probe`).

The proof fails on every way of not running FP8 that looks like running it: nothing converted (a filter that matches
nothing), a layer that is never called, emulation, another recipe than the one asked for, hardware without FP8, a count
other than the prediction, no FP8 kernel by name on CUDA, delayed scales that never move, an all-gather in high precision
where an FP8 one is asked for, another rank that disproves it or does not answer. What could not be compared is named,
and then it is no proof either. What is no fault but no FP8 arithmetic either, a CPU that multiplies FP8 codes in
float32, is said in the line. docs/verify.md lists planted faults and what catches them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fp8core.arguments import check_type
from fp8core.config import as_recipe
from fp8core.distributed.gather_reasons import gathered_as
from fp8core.distributed.wire import count_collectives
from fp8core.flops import MatmulCount, MatmulCounter
from fp8core.verify.proof import Proof
from fp8core.verify.ranks import Ranks
from fp8core.verify.records import GemmProof, LayerProof, untold
from fp8core.verify.self_test import tested_recipes
from fp8core.verify.state import State
from fp8core.verify.structure import structural_problems
from fp8core.verify.watch import Watch
from fp8core.watching import profiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.config import Float8LinearConfig
    from fp8core.linear import Float8Linear
    from fp8core.recipe import Recipe

__all__ = ["GemmProof", "LayerProof", "Proof", "verify"]

UNDERFLOW_ALARM = 0.01  # share of nonzero elements that became zero
RANK_TIMEOUT_S = 300.0


def verify(
    step_fn: Callable[[], object],
    model: nn.Module,
    *,
    recipe: Float8LinearConfig | Recipe | str | None = None,
    fp8_all_gather: bool = False,
    announce: bool = True,
    rank_timeout_s: float = RANK_TIMEOUT_S,
) -> Proof:
    """Runs a training step three times and proves, or disproves, that it runs in FP8; the model stays as it is.

    Args:
        step_fn: one whole training step: forward and backward passes, the optimizer if there is one (it will find no
            gradients). Weights, buffers, gradients, optimizer states and random numbers are afterwards what they were.
        model: that it trains; compiled or not.
        recipe: what every converted Linear must run (as for `convert_to_float8_training`); None: whatever it runs.
            Experts run what they were converted to.
        fp8_all_gather: the sharded weights of all converted layers must be gathered in one byte an element.
        announce: write `Proof.line` to stdout.
        rank_timeout_s: how long to wait for the verdicts of other ranks. All ranks must call `verify`.

    Returns:
        Proof. An exception of step_fn passes through, once the other ranks know of it and the model is as it was.

    Raises:
        TypeError: step_fn can't be called, the model is no module, or the recipe none.
        ValueError: an unknown recipe. All of these before step_fn is called.
    """
    check_type("model", model, nn.Module, "verify(step_fn, model)")
    if not callable(step_fn):
        raise TypeError(
            f"step_fn is a {type(step_fn).__name__}; expected a function that runs one training step"
        )
    wanted = None if recipe is None else as_recipe(recipe)
    ranks = Ranks()
    try:
        seen = _run(step_fn, model)
        problems = _counts(seen) if seen.predicted and not seen.counted else []
        problems += structural_problems(seen.watch, seen.proofs, wanted)
        problems += [text for text in _counts(seen) if text not in problems] + seen.problems
        if fp8_all_gather:
            problems += _gather_problems([m for _, m in seen.watch.layers], seen.proofs, seen.gathers)
        probed = tested_recipes(seen.watch, model)
        problems += probed.problems
    except BaseException as error:
        ranks.answer(f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise
    unchecked = [f"{proof.fqn}: {text}" for proof in seen.proofs for text in proof.not_checked]
    unchecked += [*probed.not_checked, *untold(seen.proofs)]
    ranks.answer("; ".join(problems or unchecked))
    problems += ranks.problems(rank_timeout_s)
    device = seen.device
    proof = Proof(
        ok=not problems and not unchecked,
        problems=tuple(problems),
        warnings=tuple(_warnings(seen.proofs) + _gather_warnings(seen.watch.layers) + seen.warnings),
        layers=tuple(proof for proof in seen.proofs if not proof.of_experts),
        predicted=seen.predicted,
        counted=seen.counted,
        device=str(device or ""),
        fp8_kernel_share=seen.kernel_share,
        all_gathers=seen.gathers,
        # `torch._scaled_mm` there, as the plain twin of `fp8core::matmul`: see `fp8core.gemm.torch_mm`, `.triton_mm`
        emulated_in="float32" if device is not None and device.type == "cpu" else "",
        experts=tuple(proof for proof in seen.proofs if proof.of_experts),
        not_checked=tuple(unchecked),
        probed=probed.recipes,
        matmuls=seen.matmuls,
        compiled=seen.compiled,
    )
    if announce:
        sys.stdout.write(proof.line + "\n")
    return proof


@dataclass
class _Seen:
    """What the three passes showed."""

    watch: Watch
    proofs: list[LayerProof] = field(default_factory=list)
    gathers: dict[str, int] = field(default_factory=dict)
    device: torch.device | None = None
    counted: int = 0
    predicted: int = 0
    kernel_share: float | None = None
    compiled: bool = False
    matmuls: MatmulCount = field(default_factory=lambda: MatmulCount(()))
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _run(step_fn: Callable[[], object], model: nn.Module) -> _Seen:
    """The three passes; the model is as it was before and after each of them."""
    state = State(model)
    watch = Watch(model, state.about_to_write)
    seen = _Seen(watch)
    layers = [layer for _, layer in watch.layers]
    updates = [layer.amaxes.updates if layer.amaxes is not None else 0 for layer in layers]
    moved = [layer.recipe.scaling != "delayed" or layer.amaxes is None for layer in layers]

    def look_at_scales() -> None:
        for index, (layer, before) in enumerate(zip(layers, updates, strict=True)):
            moved[index] |= layer.amaxes is not None and layer.amaxes.updates != before

    if layers:
        seen.device = layers[0].weight.device
    elif watch.products:
        seen.device = next(model.parameters()).device
    with state:
        with torch.compiler.set_stance("force_eager"), watch, MatmulCounter(model) as counter:
            if dist.is_available() and dist.is_initialized():
                with count_collectives() as counts:
                    step_fn()
                seen.gathers = counts.of("all_gather")
            else:
                step_fn()
        seen.matmuls = counter.result()
        look_at_scales()
        state.restore()
        step_fn()
        look_at_scales()
        lost = state.unrestorable()
        state.restore()
        seen.counted, seen.kernel_share, seen.compiled = profiled(
            step_fn, seen.device is not None and seen.device.type == "cuda"
        )
        look_at_scales()
        lost = max(lost, state.unrestorable())
    seen.proofs = watch.proofs()
    seen.problems += list(dict.fromkeys(watch.linears.arrived.faults))
    seen.predicted = sum(proof.predicted for proof in seen.proofs)
    if lost:
        seen.problems.append(
            f"a later pass wrote {lost} tensors of the model that the first did not: they could not be put back; "
            "step_fn must do the same in each call"
        )
    seen.problems += [
        f"{fqn}: delayed scales never moved; call fp8core.update_scales(model) in each step"
        for (fqn, _), has in zip(watch.layers, moved, strict=True)
        if not has
    ]
    for each in watch.linears.accumulations.values():
        if each.additions and each.dtype in (torch.bfloat16, torch.float16):
            seen.warnings.append(
                f"{each.proof.fqn}: gradients of microbatches add up in {str(each.dtype).removeprefix('torch.')}; keep "
                "weights or gradients in float32"
            )
    return seen


def _counts(seen: _Seen) -> list[str]:
    problems = []
    if seen.counted == 0:
        problems.append("no FP8 GEMM ran")
    if seen.counted != seen.predicted:
        problems.append(f"{seen.counted} FP8 GEMMs ran in a step where {seen.predicted} were predicted")
    if seen.watch.stray:
        problems.append(f"{seen.watch.stray} FP8 GEMMs ran outside of all converted layers")
    if seen.kernel_share is not None and seen.kernel_share == 0:
        problems.append("no GEMM kernel on the device has an FP8 type in its name")
    return problems


def _gather_problems(
    layers: list[Float8Linear], proofs: list[LayerProof], gathers: dict[str, int]
) -> list[str]:
    """Why the weights of the converted layers are not all gathered in FP8; empty if they are."""
    high: dict[str, list[str]] = {}
    for proof in proofs:
        if proof.recipe and proof.all_gather != "fp8":
            high.setdefault(proof.all_gather, []).append(proof.fqn)
    found = [f"the all-gather is not in FP8: {', '.join(fqns)}: {reason}" for reason, fqns in high.items()]
    if layers and not high and not gathers.get("uint8"):
        found.append(f"the all-gather is not in FP8: gathered {gathers or 'nothing'}")
    return found


def _gather_warnings(layers: list[tuple[str, Float8Linear]]) -> list[str]:
    """Layers that were to be gathered in FP8 and are not."""
    asked = ((fqn, gathered_as(layer)) for fqn, layer in layers if layer.recipe.fp8_all_gather)
    return [f"{fqn}: FP8 all-gather was asked for; {how}" for fqn, how in asked if how != "fp8"]


def _warnings(proofs: list[LayerProof]) -> list[str]:
    found = []
    for proof in proofs:
        for role, share in proof.saturated.items():
            if share > 0:
                found.append(f"{proof.fqn}: {100 * share:.3g} % of {role} saturates")
        for role, share in proof.underflowed.items():
            if share > UNDERFLOW_ALARM:
                found.append(f"{proof.fqn}: {100 * share:.3g} % of {role} underflows to zero")
    return found
