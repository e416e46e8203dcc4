"""The steps before the first block: FP8 is proved to run, and bf16 to run none of it."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch._C._autograd import _profiler_enabled

from fp8core.arguments import is_dtensor
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.profiled_gemms import fp8_gemms, profiler_events
from fp8core.verify import StepProof
from harness.store.compare import FP8_DTYPES
from harness.store.errors import UsageError
from harness.training.ab.plan import BASE, FP8
from harness.training.models.tokens import common_rows
from harness.training.steps import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from fp8core.verify import Proof
    from harness.training.ab.plan import Turn
    from harness.training.ab.result import TrialResult
    from harness.training.ab.switch import Switch


def refuse_a_profiler() -> None:
    """A trial profiles single steps itself, and PyTorch runs one profiler at a time.

    Raises:
        UsageError: one is active.
    """
    if _profiler_enabled():
        raise UsageError(
            "a profiler is active, and the trial, which profiles steps of its own, would end it: profile before "
            "the trial's first step or once trial.done"
        )


class Proving:
    """The proof of FP8, from two steps of the loop.

    Attributes:
        stray: FP8 that ran in a bf16 step, or layers that were in another precision than that of the step; "" for none.

    Args:
        switch: of the layers of the model that the loop trains.
        gather: FSDP2 must gather FP8 codes.
        rank_timeout_s: how long ranks wait for each other.
    """

    def __init__(self, switch: Switch, gather: bool, rank_timeout_s: float) -> None:
        self._switch, self._gather, self._rank_timeout_s = switch, gather, rank_timeout_s
        self.stray = ""

    @contextmanager
    def around(self, turn: Turn, *, on_gpu: bool) -> Iterator[None]:
        """Watches a step of the proof; others run as they are.

        Raises:
            UsageError: a profiler of the user's own is active by now.
        """
        if turn.purpose not in ("compare", "count", "none"):
            yield
            return
        refuse_a_profiler()
        if turn.purpose == "none":
            with profiler_events(on_gpu) as events:
                yield
            if counted := len(fp8_gemms(events)):
                self.stray = f"{counted} FP8 GEMMs ran in a step that was to be bf16"
            return
        if turn.purpose == "compare":
            self._step_proof = StepProof(
                self._switch.model,
                recipe=self._switch.recipe,
                fp8_all_gather=self._gather,
            )
        with self._step_proof.step():
            yield

    def conclude(self, found: TrialResult) -> TrialResult:
        """The record with what the proof says; all ranks must ask."""
        proof = self._step_proof.conclude(rank_timeout_s=self._rank_timeout_s)
        fp8 = proof.matmuls.by_dtype()
        high = {dtype: n for dtype, n in fp8.items() if dtype not in (*FP8_DTYPES, "emulated")}
        # What FP8 multiplies, bf16 multiplies in the dtype of the other products of the step
        main = max(high, key=lambda dtype: high[dtype], default="unknown")
        high[main] = high.get(main, 0.0) + sum(n for dtype, n in fp8.items() if dtype not in high)
        device = next(self._switch.model.parameters()).device
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            found = replace(found, gpu=(gpu.name, gpu.total_memory / 2**30))
        return replace(
            found,
            proof=proof.line,
            # Verdicts are shared: no proof on one rank is none on every rank
            problem="" if proof.ok else f"FP8 is not proved: {proof.line}",
            tokens=_tokens(proof, self._switch.model),
            flops={BASE: high, FP8: fp8},
            facts=facts_of(proof),
        )


def _tokens(proof: Proof, model: nn.Module) -> float | None:
    """Rows of the layers that do most of the work; None where weights are cut by columns or rows."""
    weights = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    cut = [p for p in weights.values() if is_dtensor(p)]
    if cut and (
        not is_sharded_by_fsdp(model) or any(sum(q.is_shard() for q in p.placements) > 1 for p in cut)
    ):
        return None
    rows: defaultdict[str, float] = defaultdict(float)
    for product in proof.matmuls.matmuls:
        name = product.owner.replace("_orig_mod.", "")
        if product.phase == "forward" and product.role == "weight" and name in weights:
            rows[name] += product.flops / (2 * weights[name].numel())
    return float(common_rows((round(n), weights[name].numel()) for name, n in rows.items())) or None
