"""The passes of a proof over one model: one compares, one counts. Whose steps they are, and what is put back, is the caller's.

`fp8core.proof.verify.verify` runs one function three times and leaves no trace; `StepProof` takes steps of a training loop
as they come. Both end in `conclude`, the one place where observations become words.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fp8core.distributed.weight_gather import weight_gather_precision
from fp8core.gemm import backend_named
from fp8core.linear import Float8Linear
from fp8core.proof.flops import MatmulCount
from fp8core.proof.profiled_gemms import Profiled, profiling
from fp8core.proof.verify.calls import Watch
from fp8core.proof.verify.probe import tested_recipes
from fp8core.proof.verify.proof import Proof
from fp8core.proof.verify.ranks import Ranks
from fp8core.proof.verify.records import inconclusive
from fp8core.proof.wire import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fp8core.proof.verify.records import LayerProof
    from fp8core.recipe import Recipe

UNDERFLOW_ALARM = 0.01  # share of nonzero elements that became zero


class Passes:
    """Context managers, each around one whole training step.

    Args:
        model: that the steps train; compiled or not.
        on_write: called before an operator of the compared step writes a tensor.

    Attributes:
        watch: what the compared step showed.
        device: of the first converted layer; None if there is none.
        problems: beyond those that follow from the rest.
    """

    def __init__(
        self, model: nn.Module, on_write: Callable[[torch.Tensor], None] = lambda tensor: None
    ) -> None:
        self.model = model
        self.watch = Watch(model, on_write)
        self.layers = [(fqn, m) for fqn, m in self.watch.modules if isinstance(m, Float8Linear)]
        weights = (self.layers[0][1].weight if self.layers else p for p in model.parameters())
        self.device = next(weights).device if self.watch.modules else None
        self.gathers: dict[str, int] = {}
        self.profiled = Profiled()
        self.matmuls = MatmulCount(())
        self.problems: list[str] = []
        # Layers whose delayed scales have not moved yet -> how often they had
        self.still = {
            fqn: (layer.amaxes, layer.amaxes.updates)
            for fqn, layer in self.layers
            if layer.recipe.scaling == "delayed" and layer.amaxes is not None
        }

    @contextmanager
    def compare(self) -> Iterator[None]:
        """A step in eager mode, whatever was compiled: each call is held against independent arithmetic."""
        with self.watch:
            yield
        self.gathers = Collectives(self.watch.counter.recorder.rows).of("all_gather")
        self.matmuls = self.watch.counter.result()
        self.look_at_scales()

    @contextmanager
    def count(self) -> Iterator[None]:
        """A step as it is: the FP8 GEMMs that ran are counted."""
        with profiling(self.device is not None and self.device.type == "cuda") as self.profiled:
            yield
        self.look_at_scales()

    def look_at_scales(self) -> None:
        """Notes which delayed scales have moved; after each step."""
        self.still = {fqn: seen for fqn, seen in self.still.items() if seen[0].updates == seen[1]}


def conclude(
    see: Callable[[], Passes],
    recipe: Recipe | None,
    fp8_all_gather: bool,
    rank_timeout_s: float,
    announce: bool,
) -> Proof:
    """The verdict over what was seen, of this rank and of all others; an exception on the way is reported to them first."""
    ranks = Ranks()
    try:
        seen = see()
        proofs = seen.watch.proofs()
        predicted = sum(proof.predicted for proof in proofs)
        problems = _problems(seen, proofs, predicted, recipe, fp8_all_gather)
        probed, faults, unprobed = tested_recipes(seen.watch, seen.model)
        problems += faults
    except BaseException as error:
        ranks.answer(f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise
    unchecked = [f"{proof.fqn}: {text}" for proof in proofs for text in proof.not_checked]
    unchecked += [*unprobed, *inconclusive(proofs)]
    ranks.weights = seen.watch.shared.sums
    ranks.answer("; ".join(problems or unchecked))
    problems += ranks.problems(rank_timeout_s)
    device = seen.device
    warnings = list(_warnings(seen, proofs))
    if ranks.gradients:
        some = ", ".join(sorted(ranks.gradients)[:3])
        warnings.append(
            f"{len(ranks.gradients)} gradients differ between ranks, as if they were not reduced: {some}"
        )
    proof = Proof(
        problems=tuple(problems),
        warnings=tuple(warnings),
        layers=tuple(proof for proof in proofs if not proof.of_experts),
        predicted=predicted,
        counted=seen.profiled.counted,
        device=str(device or ""),
        fp8_kernel_share=seen.profiled.fp8_share,
        all_gathers=seen.gathers,
        # `torch._scaled_mm` there, as the plain twin of `fp8core::matmul`: see `fp8core.gemm.torch_mm`, `.triton_mm`
        emulated_in="float32" if device is not None and device.type == "cpu" else "",
        experts=tuple(proof for proof in proofs if proof.of_experts),
        not_checked=tuple(unchecked),
        probed=probed,
        matmuls=seen.matmuls,
        compiled=seen.profiled.compiled,
        shared_weights=len(ranks.alike & seen.watch.shared.layers),
        unjudged=tuple(layer.fqn for layer in proofs if layer.unjudged),
    )
    if announce:
        sys.stdout.write(proof.line + "\n")
    return proof


def _problems(
    seen: Passes, proofs: list[LayerProof], predicted: int, wanted: Recipe | None, fp8_all_gather: bool
) -> list[str]:
    """What is wrong, as lines; first what explains the others."""
    counted, stray, layers = seen.profiled.counted, seen.watch.stray, [layer for _, layer in seen.layers]
    all_seen = not any(proof.in_threads for proof in proofs)
    counts = {
        "no FP8 GEMM ran": counted == 0,
        f"{counted} FP8 GEMMs ran in a step where {predicted} were predicted": all_seen
        and counted != predicted,
        f"{stray} FP8 GEMMs ran outside of all converted layers": all_seen and stray,
        "no GEMM kernel on the device has an FP8 type in its name": seen.profiled.fp8_share == 0,
    }
    found: list[str] = []
    if not seen.watch.modules:
        found.append("no layer is converted to FP8 (did module_filter_fn match nothing?)")
    others = sorted({str(layer.recipe) for layer in layers if layer.recipe != wanted})
    if wanted is not None and others:
        found.append(f"recipe {wanted} was asked for, {', '.join(others)} runs")
    backends = [backend_named(module.recipe.backend) for _, module in seen.watch.modules]
    emulated = sum(not backend.is_fp8 for backend in backends)
    four = sum(module.recipe.is_four_bit for _, module in seen.watch.modules)
    if emulated:
        what = f", {four} of them with operands of four bits, e2m1" if four else ""
        found.append(f"{emulated} of {len(backends)} converted layers are emulated in high precision{what}")
    for layer in layers:
        gemm, backend = layer.recipe.output, backend_named(layer.recipe.backend)
        if gemm.a is not None and gemm.b is not None:
            found.append(backend.device_reason(layer.weight.device, gemm.a.format, gemm.b.format) or "")
    for proof in proofs:
        if proof.recipe and not proof.calls:
            found.append(f"{proof.fqn}: converted, but never called")
        found += proof.problems()
    unexplained = [text for text, is_so in counts.items() if is_so]
    found = unexplained + found if predicted and not counted else found + unexplained
    found += [*seen.watch.gathered.faults, *seen.problems]
    found += [
        f"{fqn}: delayed scales never moved; call fp8core.update_scales(model) in each step"
        for fqn in seen.still
    ]
    if fp8_all_gather:
        high: dict[str, list[str]] = {}
        for proof in proofs:
            if proof.recipe and proof.all_gather != "fp8":
                high.setdefault(proof.all_gather, []).append(proof.fqn)
        found += [
            f"the all-gather is not in FP8: {', '.join(fqns)}: {reason}" for reason, fqns in high.items()
        ]
        if layers and not high and not seen.gathers.get("uint8"):
            found.append(f"the all-gather is not in FP8: gathered {seen.gathers or 'nothing'}")
    return list(dict.fromkeys(filter(None, found)))


def _warnings(seen: Passes, proofs: list[LayerProof]) -> Iterator[str]:
    for proof in proofs:
        if proof.few_tokens:
            yield f"{proof.fqn}: {proof.few_tokens} of {proof.calls} calls have too few tokens and ran in high precision"
        led_to, reached = proof.backward
        if 0 < reached < led_to:
            yield f"{proof.fqn}: the loss does not depend on all of its {proof.calls} calls; of the others no gradient was judged"
        for role, share in proof.saturated.items():
            if share > 0:
                yield f"{proof.fqn}: {100 * share:.3g} % of {role} saturates"
        for role, share in proof.underflowed.items():
            if share > UNDERFLOW_ALARM:
                yield f"{proof.fqn}: {100 * share:.3g} % of {role} underflows to zero"
    for fqn, layer in seen.layers:  # that were to be gathered in FP8 and are not
        how = weight_gather_precision(layer)
        if layer.recipe.fp8_all_gather and how != "fp8":
            yield f"{fqn}: FP8 all-gather was asked for; {how}"
    for sums in seen.watch.sums.values():
        if sums.dtype in (torch.bfloat16, torch.float16):
            yield (
                f"{sums.proof.fqn}: gradients of microbatches add up in {str(sums.dtype).removeprefix('torch.')}; keep "
                "weights or gradients in float32"
            )
