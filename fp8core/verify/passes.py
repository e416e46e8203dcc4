"""The passes of a proof over one model: one compares, one counts. Whose steps they are, and what is put back, is the caller's.

`fp8core.verify.verify` runs one function three times and leaves no trace; `StepProof` takes steps of a training loop
as they come. Both end in `conclude`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fp8core.distributed.gather_reasons import gathered_as
from fp8core.distributed.wire import count_collectives
from fp8core.flops import MatmulCount, MatmulCounter
from fp8core.verify.proof import Proof
from fp8core.verify.records import untold
from fp8core.verify.self_test import tested_recipes
from fp8core.verify.structure import structural_problems
from fp8core.verify.watch import Watch
from fp8core.watching import profiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from fp8core.linear import Float8Linear
    from fp8core.recipe import Recipe
    from fp8core.verify.ranks import Ranks
    from fp8core.verify.records import LayerProof

UNDERFLOW_ALARM = 0.01  # share of nonzero elements that became zero


@dataclass
class PassResults:
    """What the passes showed.

    Attributes:
        device: of the first converted layer; None if there is none.
        problems: beyond those that follow from the rest.
    """

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


class Passes:
    """Context managers, each around one whole training step; `seen` once both are through.

    Args:
        model: that the steps train; compiled or not.
        on_write: called before an operator of the compared step writes a tensor.
    """

    def __init__(
        self, model: nn.Module, on_write: Callable[[torch.Tensor], None] = lambda tensor: None
    ) -> None:
        self._model = model
        self._watch = Watch(model, on_write)
        self._seen = PassResults(self._watch)
        self._layers = [layer for _, layer in self._watch.layers]
        self._updates = [layer.amaxes.updates if layer.amaxes is not None else 0 for layer in self._layers]
        self._moved = [layer.recipe.scaling != "delayed" or layer.amaxes is None for layer in self._layers]
        if self._layers:
            self._seen.device = self._layers[0].weight.device
        elif self._watch.products:
            self._seen.device = next(model.parameters()).device

    @property
    def on_gpu(self) -> bool:
        """Whether what is proved lies on a GPU."""
        return self._seen.device is not None and self._seen.device.type == "cuda"

    @contextmanager
    def compare(self) -> Iterator[None]:
        """A step in eager mode, whatever was compiled: each call is held against independent arithmetic."""
        seen = self._seen
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._watch)
            counter = stack.enter_context(MatmulCounter(self._model))
            counts = (
                stack.enter_context(count_collectives())
                if dist.is_available() and dist.is_initialized()
                else None
            )
            yield
        if counts is not None:
            seen.gathers = counts.of("all_gather")
        seen.matmuls = counter.result()
        self.look_at_scales()

    @contextmanager
    def count(self) -> Iterator[None]:
        """A step as it is: the FP8 GEMMs that ran are counted."""
        with profiling(self.on_gpu) as profiled:
            yield
        seen = self._seen
        seen.counted, seen.kernel_share, seen.compiled = (
            profiled.counted,
            profiled.fp8_share,
            profiled.compiled,
        )
        self.look_at_scales()

    def look_at_scales(self) -> None:
        """Notes which delayed scales have moved; after each step."""
        for index, (layer, before) in enumerate(zip(self._layers, self._updates, strict=True)):
            self._moved[index] |= layer.amaxes is not None and layer.amaxes.updates != before

    def seen(self) -> PassResults:
        """What both passes showed."""
        seen = self._seen
        seen.proofs = self._watch.proofs()
        seen.problems += list(dict.fromkeys(self._watch.linears.arrived.faults))
        seen.predicted = sum(proof.predicted for proof in seen.proofs)
        seen.problems += [
            f"{fqn}: delayed scales never moved; call fp8core.update_scales(model) in each step"
            for (fqn, _), has in zip(self._watch.layers, self._moved, strict=True)
            if not has
        ]
        for each in self._watch.linears.accumulations.values():
            if each.additions and each.dtype in (torch.bfloat16, torch.float16):
                seen.warnings.append(
                    f"{each.proof.fqn}: gradients of microbatches add up in {str(each.dtype).removeprefix('torch.')}; keep "
                    "weights or gradients in float32"
                )
        return seen


def conclude(
    see: Callable[[], PassResults],
    model: nn.Module,
    ranks: Ranks,
    *,
    recipe: Recipe | None,
    fp8_all_gather: bool,
    rank_timeout_s: float,
) -> Proof:
    """The verdict over what was seen, of this rank and of all others; an exception on the way is told to them first."""
    try:
        seen = see()
        problems = _counts(seen) if seen.predicted and not seen.counted else []
        problems += structural_problems(seen.watch, seen.proofs, recipe)
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
    return Proof(
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


def _counts(seen: PassResults) -> list[str]:
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
