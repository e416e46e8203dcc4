"""What is wrong with converted layers themselves, and what their comparisons found, before any count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core.gemm import backend_named

if TYPE_CHECKING:
    from fp8core.recipe import Recipe
    from fp8core.verify.records import LayerProof
    from fp8core.verify.watch import Watch


def structural_problems(watch: Watch, proofs: list[LayerProof], wanted: Recipe | None) -> list[str]:
    """Problems as lines, each with its layer's name."""
    layers = [layer for _, layer in watch.layers]
    if not layers and not watch.products:
        return ["no layer is converted to FP8 (did module_filter_fn match nothing?)"]
    problems = list(watch.linears.arrived.faults[:3])
    if wanted is not None:
        others = sorted({str(layer.recipe) for layer in layers if layer.recipe != wanted})
        if others:
            problems.append(f"recipe {wanted} was asked for, {', '.join(others)} runs")
    recipes = [layer.recipe for layer in layers]
    recipes += [product.recipe for _, product in watch.products if product.recipe is not None]
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
        problems += proof.problems()
    return problems
