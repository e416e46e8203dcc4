"""Switching a model between bf16 and FP8 in place, and seeing in which it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import nn

from fp8core.config import as_recipe
from fp8core.convert import convert_to_float8_training
from fp8core.distributed.fsdp import switch_gathers
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.distributed.gather_reasons import gathered_as, recipe_reason
from fp8core.linear import Float8Linear
from fp8core.schedule import PrecisionSchedule
from harness.store.errors import UsageError
from harness.training.ab.plan import FP8, GATHER

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.recipe import Recipe


class Switch:
    """The FP8 layers of a model, and the precision in which they are.

    Attributes:
        layers: all of them.
        found_in_fp8: the model came converted and in FP8.
        asked: the recipe that the trial was given.

    Args:
        model: converted, or to be converted now, in place: its parameters stay the objects that an optimizer holds, but
            for those that FSDP2 is to gather in FP8.
        recipe: of the layers that are converted now; a model that is converted already must run it.
        module_filter_fn: as for `convert_to_float8_training`.
        fp8_all_gather: what is converted now is converted for FP8 all-gather, which makes new parameters. "both": FSDP2
            gathers codes in one FP8 arm, and weights in high precision in the other.

    Raises:
        UsageError: nothing can be converted, the model runs another recipe, or it is too late to convert it; or weights of
            which FSDP2 gathers no codes were to be gathered both ways.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str,
        module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
        *,
        fp8_all_gather: bool | Literal["both"] = False,
    ) -> None:
        if not isinstance(recipe, str):
            raise UsageError(f"recipe={recipe!r}: expected the name of an FP8 recipe")
        if isinstance(model, nn.Linear):
            raise UsageError(
                "the model is a single Linear layer, which cannot be replaced in place; wrap it in a module"
            )
        reason = recipe_reason(as_recipe(recipe)) if fp8_all_gather else ""
        if reason:
            raise UsageError(
                f"fp8_all_gather={fp8_all_gather!r}: FSDP2 cannot gather FP8 codes of the recipe {recipe!r}: {reason}; take "
                "recipe='tensorwise', or fp8_all_gather=False"
            )
        self.model = model
        self.converted_here = not _layers(model)
        if self.converted_here:
            if is_sharded_by_fsdp(model):
                raise UsageError(
                    "the model is sharded and has no FP8 layer: call convert_to_float8_training before fully_shard"
                )
            convert_to_float8_training(
                getattr(model, "_orig_mod", model),
                config=as_recipe(recipe).with_fp8_all_gather(bool(fp8_all_gather)),
                module_filter_fn=module_filter_fn,
                allow_no_conversion=True,  # told below, in one line
            )
        self.layers = _layers(model)
        if not self.layers:
            raise UsageError(
                "no layer of the model takes FP8 (Linear layers with multiples of 16 on both sides do): see fp8core.audit(model)"
            )
        asked = as_recipe(recipe)
        own = {id(layer): layer.suspended_recipe or layer.recipe for layer in self.layers}
        others = {str(r) for r in own.values() if r.name != asked.name}
        if others:
            raise UsageError(
                f"recipe={recipe!r}: the model was converted with {', '.join(sorted(others))}; name that one, or give the "
                "model as it was before"
            )
        in_fp8 = sum(layer.recipe is own[id(layer)] for layer in self.layers)
        if 0 < in_fp8 < len(self.layers) or (not in_fp8 and self.layers_held() < len(self.layers)):
            raise UsageError(
                "a PrecisionSchedule holds a part of the model in high precision; end it, since a trial switches all layers"
            )
        self.found_in_fp8 = bool(in_fp8) and not self.converted_here
        self._held, self._free = PrecisionSchedule.parse("keep_bf16"), PrecisionSchedule()
        self._converted = own  # the very objects: compiled code is guarded by them
        self._of_arm: dict[str, dict[int, Recipe]] = {}  # of arms that run another recipe
        if fp8_all_gather == "both":
            self._refuse_one_gather(recipe)
            plain = {r: r.with_fp8_all_gather(False) for r in set(own.values())}
            self._of_arm[FP8] = {layer: plain[r] for layer, r in own.items()}
        self.asked = asked

    def _refuse_one_gather(self, recipe: str) -> None:
        self._free.apply(self.model, 0, 1)
        reasons = {gathered_as(layer) for layer in self.layers} - {"fp8"}
        if reasons:
            raise UsageError(
                f"fp8_all_gather='both': of the recipe {recipe!r} here FSDP2 gathers weights in {min(reasons)}; take "
                "fp8_all_gather=False, or convert with Float8LinearConfig(enable_fsdp_float8_all_gather=True)"
            )

    def recipes(self, arm: str) -> dict[int, Recipe]:
        """What each layer runs in an FP8 arm, by its id."""
        return self._of_arm.get(arm, self._converted)

    def recipe(self, arm: str) -> Recipe:
        """What all layers run in an FP8 arm, with what the conversion added to the named recipe; that where they differ."""
        found = set(self.recipes(arm).values())
        return found.pop() if len(found) == 1 else self.asked

    def to(self, arm: str) -> None:
        """All layers into the precision of an arm; between optimizer steps."""
        if arm not in (FP8, GATHER):
            self.leave(fp8=False)
            return
        self.leave(fp8=True)
        if arm in self._of_arm:
            switch_gathers(self.model, lambda: self._run(self._of_arm[arm]))

    def leave(self, *, fp8: bool) -> None:
        """All layers into FP8 as they were converted, or into high precision."""
        (self._free if fp8 else self._held).apply(self.model, 0, 1)

    def _run(self, recipes: dict[int, Recipe]) -> int:
        for layer in self.layers:
            layer.recipe = recipes[id(layer)]
            layer.suspended_recipe = self._converted[
                id(layer)
            ]  # what a schedule, or another trial, returns to
            if layer.weight_cache is not None:
                layer.weight_cache.entry = None
        return len(self.layers)

    def layers_held(self) -> int:
        """How many layers multiply nothing in FP8."""
        return sum(layer.recipe.fp8_gemms == 0 for layer in self.layers)

    def fault(self, arm: str) -> str:
        """Why the layers are not in the precision of an arm; "" if they are."""
        if arm in (FP8, GATHER):
            due, word = self.recipes(arm), "FP8"
            count = sum(layer.recipe is due[id(layer)] for layer in self.layers)
        else:
            count, word = self.layers_held(), "high precision"
        if count == len(self.layers):
            return ""
        return f"{len(self.layers) - count} of {len(self.layers)} FP8 layers were not in {word} at the end of a step"


def _layers(model: nn.Module) -> list[Float8Linear]:
    return [module for module in model.modules() if isinstance(module, Float8Linear)]
