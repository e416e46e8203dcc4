"""verify: a proof, read by machines, that a training step runs in FP8.

The step runs three times. The first time, in eager mode whatever was compiled, hooks note each call of each
Float8Linear: what its operands saturate and lose, whether its output is that of the recipe, and which GEMMs must
follow. The second time it runs as is, so that what is compiled compiles; the third time a profiler counts the FP8
GEMMs that ran. What must follow, of each call:

    output        once; again for each recomputation in a backward pass
    grad_input    where the input needs a gradient
    grad_weight   where the weight does

each only if the recipe casts it. The proof fails on every way of not running FP8 that looks like running it:
nothing converted (a filter that matches nothing), a layer that is never called, emulation, another recipe than the
one asked for, hardware without FP8, a count other than the prediction, an output that is not the recipe's (a stale
weight, a wrong scale), no FP8 kernel by name on CUDA, delayed scales that never move, and an all-gather in high
precision where an FP8 one is asked for. What is no fault but no FP8 arithmetic either, a CPU that multiplies FP8 codes
in float32, is said in the line.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fp8core.arguments import check_type
from fp8core.config import as_recipe
from fp8core.gemm import backend_named
from fp8core.watching import Gathers, LayerProof, Watch, profiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.config import Float8LinearConfig
    from fp8core.linear import Float8Linear
    from fp8core.moe import GroupedMatmul
    from fp8core.recipe import Recipe

AGREEMENT_DB = 35.0  # between a layer and its emulation; two right ones differ by bf16 rounding (55 dB) or
# accumulation (over 50 dB), two independent FP8 roundings by 25 dB
UNDERFLOW_ALARM = 0.01  # share of nonzero elements that became zero


@dataclass(frozen=True)
class Proof:
    """What `verify` found.

    Attributes:
        ok: FP8 runs as asked.
        problems: why not; empty if ok.
        warnings: what a user should look at although FP8 runs.
        layers: every Linear of the model.
        experts: the product of every module of experts that is converted.
        predicted, counted: FP8 GEMMs of one step.
        device: of the first converted layer, "" if there is none.
        fp8_kernel_share: of the GEMM kernels' time, in kernels of an FP8 type by their names; None off CUDA.
        all_gathers: dtype -> bytes gathered by one step; empty where nothing is sharded.
        emulated_in: the precision in which the device multiplies FP8 codes, where it has no FP8 matrix units (a CPU,
            with any backend); "" on others.
    """

    ok: bool
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    layers: tuple[LayerProof, ...]
    predicted: int
    counted: int
    device: str
    fp8_kernel_share: float | None
    all_gathers: dict[str, int]
    emulated_in: str = ""
    experts: tuple[LayerProof, ...] = ()

    @property
    def exit_code(self) -> int:
        """For a process: 0 FP8 runs as asked, 1 it doesn't."""
        return 0 if self.ok else 1

    @property
    def line(self) -> str:
        """One line; it starts with "FP8 verified" only if `ok`."""
        if not self.ok:
            return "FP8 NOT verified: " + "; ".join(self.problems)
        converted = [layer for layer in self.layers if layer.recipe]
        experts = f" and {len(self.experts)} modules of experts" if self.experts else ""
        recipes = ", ".join(sorted({layer.recipe for layer in (*converted, *self.experts)}))
        share = "" if self.fp8_kernel_share is None else f", {100 * self.fp8_kernel_share:.0f} % of GEMM time"
        line = (
            f"FP8 verified: {len(converted)} of {len(self.layers)} Linear layers{experts}, {self.counted} FP8 GEMMs a "
            f"step as predicted, recipe {recipes}, on {self.device}{share}"
        )
        if self.emulated_in:
            line += (
                f", whose arithmetic is emulated: it multiplies FP8 codes in {self.emulated_in}. Casts and calls are "
                "FP8's, speed is not"
            )
        return line

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {"exit_code": self.exit_code, "line": self.line, **asdict(self)}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def verify(
    step_fn: Callable[[], object],
    model: nn.Module,
    *,
    recipe: Float8LinearConfig | Recipe | str | None = None,
    fp8_all_gather: bool = False,
    announce: bool = True,
) -> Proof:
    """Runs a training step three times and proves, or disproves, that it runs in FP8.

    Args:
        step_fn: one whole training step: forward and backward passes, the optimizer if there is one. It moves the
            model on by three steps.
        model: that it trains; compiled or not.
        recipe: what every converted Linear must run (as for `convert_to_float8_training`); None: whatever it runs.
            Experts run what they were converted to.
        fp8_all_gather: sharded weights must be gathered in one byte an element.
        announce: write `Proof.line` to stdout.

    Returns:
        Proof. An exception of step_fn passes through.

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
    watch = Watch(model)
    layers = [layer for _, layer in watch.layers]
    experts = [product for _, product in watch.products]
    updates = [layer.amaxes.updates if layer.amaxes is not None else 0 for layer in layers]
    gathers: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(watch)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(Gathers(gathers))
        step_fn()
    device = layers[0].weight.device if layers else None
    if device is None and experts:
        device = next(model.parameters()).device
    step_fn()
    counted, share = profiled(step_fn, device is not None and device.type == "cuda")
    proofs = watch.proofs()
    predicted = sum(proof.predicted for proof in proofs)

    problems = _structural(layers, experts, proofs, wanted)
    if counted == 0:
        problems.append("no FP8 GEMM ran")
    if counted != predicted:
        problems.append(f"{counted} FP8 GEMMs ran in a step where {predicted} were predicted")
    if share is not None and share == 0:
        problems.append("no GEMM kernel on the device has an FP8 type in its name")
    for (fqn, layer), before in zip(watch.layers, updates, strict=True):
        if layer.recipe.scaling == "delayed" and layer.amaxes is not None and layer.amaxes.updates == before:
            problems.append(
                f"{fqn}: delayed scales never moved; call fp8core.update_scales(model) in each step"
            )
    high = {dtype: size for dtype, size in gathers.items() if "float8" not in dtype and "int8" not in dtype}
    if fp8_all_gather and (high or not gathers):
        problems.append(f"the all-gather is not in FP8: gathered {dict(gathers) or 'nothing'}")
    proof = Proof(
        ok=not problems,
        problems=tuple(problems),
        warnings=tuple(_warnings(proofs)),
        layers=tuple(proof for proof in proofs if not proof.of_experts),
        predicted=predicted,
        counted=counted,
        device=str(device or ""),
        fp8_kernel_share=share,
        all_gathers=dict(gathers),
        # `torch._scaled_mm` there, as the plain twin of `fp8core::matmul`: see `fp8core.gemm.torch_mm`, `.triton_mm`
        emulated_in="float32" if device is not None and device.type == "cpu" else "",
        experts=tuple(proof for proof in proofs if proof.of_experts),
    )
    if announce:
        sys.stdout.write(proof.line + "\n")
    return proof


def _structural(
    layers: list[Float8Linear], experts: list[GroupedMatmul], proofs: list[LayerProof], wanted: Recipe | None
) -> list[str]:
    """What is wrong with the layers themselves, before any count."""
    if not layers and not experts:
        return ["no layer is converted to FP8 (did module_filter_fn match nothing?)"]
    problems = []
    if wanted is not None:
        others = sorted({str(layer.recipe) for layer in layers if layer.recipe != wanted})
        if others:
            problems.append(f"recipe {wanted} was asked for, {', '.join(others)} runs")
    recipes = [layer.recipe for layer in layers]
    recipes += [product.recipe for product in experts if product.recipe is not None]
    emulated = sum(not backend_named(recipe.backend).is_fp8 for recipe in recipes)
    if emulated:
        problems.append(f"{emulated} of {len(recipes)} converted layers are emulated in high precision")
    for layer in layers:
        gemm = layer.recipe.output
        if gemm.a is not None and gemm.b is not None:
            rules = backend_named(layer.recipe.backend)
            reason = rules.device_reason(layer.weight.device, gemm.a.format, gemm.b.format)
            if reason is not None and reason not in problems:
                problems.append(reason)
    for proof in proofs:
        if proof.recipe and not proof.calls:
            problems.append(f"{proof.fqn}: converted, but never called")
        if proof.agreement_db is not None and not proof.agreement_db >= AGREEMENT_DB:
            problems.append(
                f"{proof.fqn}: output is not the recipe's: {proof.agreement_db:.1f} dB from its emulation, "
                f"{AGREEMENT_DB:g} expected"
            )
    return problems


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
