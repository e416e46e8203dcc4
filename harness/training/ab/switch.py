"""Switching a model between bf16 and FP8 in place, and seeing in which it is."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from fp8core.config import as_recipe
from fp8core.convert import convert_to_float8_training
from fp8core.distributed.fsdp import switch_gathers
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.distributed.weight_gather import recipe_reason
from fp8core.linear import Float8Linear
from fp8core.schedule import PrecisionSchedule
from harness.store.errors import UsageError
from harness.training.ab.plan import AGAIN, BASE, FP8

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Recipe


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
