"""The steps before the first block: FP8 is proved to run, and bf16 to run none of it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C._autograd import _profiler_enabled

from fp8core.arguments import is_dtensor
from fp8core.config import as_recipe
from fp8core.convert import convert_to_float8_training
from fp8core.distributed.fsdp import switch_gathers
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.distributed.weight_gather import recipe_reason
from fp8core.linear import Float8Linear
from fp8core.proof.profiled_gemms import fp8_gemms, profiler_events
from fp8core.proof.verify import StepProof
from fp8core.schedule import PrecisionSchedule
from harness.store.compare import FP8_DTYPES
from harness.store.errors import UsageError
from harness.training.ab.result import AGAIN, BASE, FP8
from harness.training.models.calls import common_rows
from harness.training.steps import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fp8core.proof.verify import Proof
    from fp8core.recipe import Recipe
    from harness.training.ab.result import PlannedStep, TrialResult


class Switch:
    """The FP8 layers of a model, and what each runs in each precision; it leaves the model in bf16.

    Attributes:
        layers: all of them.
        found_in_fp8: the model came converted and in FP8.
        asked: the recipe that the trial was given.
        recipes: of each arm what each layer runs; always the same objects: compiled code is guarded by them.
        arm: in which the model is.

    Args:
        model: converted, or to be converted now, in place: its parameters stay the objects that an optimizer holds, but
            for those that FSDP2 is to gather in FP8.
        recipe: of the layers that are converted now; a model that is converted already must run it.
        module_filter_fn: as for `convert_to_float8_training`.
        fp8_all_gather: what is converted now is converted for FP8 all-gather, which makes new parameters.

    Raises:
        UsageError: nothing can be converted, the model runs another recipe, or it is too late to convert it.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str,
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        *,
        fp8_all_gather: bool = False,
    ) -> None:
        if not isinstance(recipe, str):
            raise UsageError(f"recipe={recipe!r}: expected the name of an FP8 recipe")
        if isinstance(model, nn.Linear):
            raise UsageError(
                "the model is a single Linear layer, which cannot be replaced in place; wrap it in a module"
            )
        self.model, self.asked, self.arm = model, as_recipe(recipe), BASE
        if fp8_all_gather and (reason := recipe_reason(self.asked)):
            raise UsageError(
                f"fp8_all_gather=True: FSDP2 cannot gather FP8 codes of the recipe {recipe!r}: {reason}; take "
                "recipe='tensorwise', or fp8_all_gather=False"
            )
        came_plain = not self._find()
        if came_plain:
            if is_sharded_by_fsdp(model):
                raise UsageError(
                    "the model is sharded and has no FP8 layer: call convert_to_float8_training before fully_shard"
                )
            convert_to_float8_training(
                getattr(model, "_orig_mod", model),
                config=self.asked.with_fp8_all_gather(fp8_all_gather),
                module_filter_fn=module_filter_fn,
                allow_no_conversion=True,  # told below, in one line
            )
        if not self._find():
            raise UsageError(
                "no layer of the model takes FP8 (Linear layers with multiples of 16 on both sides do): see fp8core.audit(model)"
            )
        own = {layer: layer.suspended_recipe or layer.recipe for layer in self.layers}
        others = {str(r) for r in own.values() if r.name != self.asked.name}
        if others:
            raise UsageError(
                f"recipe={recipe!r}: the model was converted with {', '.join(sorted(others))}; name that one, or give the "
                "model as it was before"
            )
        in_fp8 = sum(layer.recipe is own[layer] for layer in self.layers)
        held = sum(layer.recipe.fp8_gemms == 0 for layer in self.layers)
        if len(self.layers) not in (in_fp8, held):
            raise UsageError(
                "a PrecisionSchedule holds a part of the model in high precision; end it, since a trial switches all layers"
            )
        self.found_in_fp8 = bool(in_fp8) and not came_plain
        # What runs before the first step, an evaluation say, is not in FP8 by surprise
        PrecisionSchedule.parse("keep_bf16").apply(model, 0, 1)
        bf16 = {layer: layer.recipe for layer in self.layers}
        self.recipes = {BASE: bf16, AGAIN: bf16, FP8: own}

    def _find(self) -> list[Float8Linear]:
        self.layers = [module for module in self.model.modules() if isinstance(module, Float8Linear)]
        return self.layers

    @property
    def recipe(self) -> Recipe:
        """What all layers run in FP8, with what the conversion added to the named recipe; that where they differ."""
        found = set(self.recipes[FP8].values())
        return found.pop() if len(found) == 1 else self.asked

    def fingerprints(self) -> list[str]:
        """The recipes of the layers, each with a hash of all that it says: recipes of one name may cast otherwise."""
        found = set(self.recipes[FP8].values())
        texts = [(str(r), repr(replace(r, doc="")).encode()) for r in found]
        return sorted(f"{name} ({hashlib.sha256(text).hexdigest()[:8]})" for name, text in texts)

    def to(self, arm: str) -> None:
        """All layers into the precision of an arm; between optimizer steps."""

        def change() -> int:
            for layer, recipe in self.recipes[arm].items():
                own = self.recipes[FP8][layer]
                layer.recipe = recipe
                layer.suspended_recipe = None if recipe is own else own  # what a schedule returns to
                if layer.weight_cache is not None:
                    layer.weight_cache.entry = None  # casts of the recipe that was
            return len(self.layers)

        switch_gathers(self.model, change)
        self.arm = arm

    def fault(self, arm: str) -> str:
        """Why the layers are not in the precision of an arm; "" if they are."""
        wrong = sum(layer.recipe is not recipe for layer, recipe in self.recipes[arm].items())
        precision = "FP8" if arm == FP8 else "high precision"
        if not wrong:
            return ""
        return f"{wrong} of {len(self.layers)} FP8 layers were not in {precision} at the end of a step"


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
    def around(self, turn: PlannedStep, *, on_gpu: bool) -> Iterator[None]:
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
