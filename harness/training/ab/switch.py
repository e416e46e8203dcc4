"""Switching a model between bf16 and FP8 in place, and seeing in which it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fp8core.config import as_recipe
from fp8core.convert import convert_to_float8_training
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.linear import Float8Linear
from fp8core.schedule import PrecisionSchedule
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class Switch:
    """The FP8 layers of a model, and the precision in which they are.

    Attributes:
        layers: all of them.
        recipe: that they run, with what the conversion added to the named one (FP8 all-gather).
        found_in_fp8: the model came converted and in FP8.

    Args:
        model: converted, or to be converted now, in place: its parameters stay the objects that an optimizer holds.
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
        fp8_all_gather: bool = False,
    ) -> None:
        if not isinstance(recipe, str):
            raise UsageError(f"recipe={recipe!r}: expected the name of an FP8 recipe")
        if isinstance(model, nn.Linear):
            raise UsageError(
                "the model is a single Linear layer, which cannot be replaced in place; wrap it in a module"
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
                config=as_recipe(recipe).with_fp8_all_gather(fp8_all_gather),
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
        self._fp8 = own
        self.recipe = own[id(self.layers[0])] if len(set(own.values())) == 1 else asked
        in_fp8 = self.layers_in_fp8()
        if 0 < in_fp8 < len(self.layers) or (not in_fp8 and self.layers_held() < len(self.layers)):
            raise UsageError(
                "a PrecisionSchedule holds a part of the model in high precision; end it, since a trial switches all layers"
            )
        self.found_in_fp8 = bool(in_fp8) and not self.converted_here
        self._held, self._free = PrecisionSchedule.parse("keep_bf16"), PrecisionSchedule()

    def to(self, fp8: bool) -> None:
        """All layers into one precision; between optimizer steps."""
        (self._free if fp8 else self._held).apply(self.model, 0, 1)

    def layers_in_fp8(self) -> int:
        """How many layers multiply in FP8 as they were converted to."""
        return sum(layer.recipe is self._fp8[id(layer)] for layer in self.layers)

    def layers_held(self) -> int:
        """How many layers multiply nothing in FP8."""
        return sum(layer.recipe.fp8_gemms == 0 for layer in self.layers)

    def fault(self, fp8: bool) -> str:
        """Why the layers are not in the precision that was set; "" if they are."""
        count = self.layers_in_fp8() if fp8 else self.layers_held()
        if count == len(self.layers):
            return ""
        word = "FP8" if fp8 else "high precision"
        return f"{len(self.layers) - count} of {len(self.layers)} FP8 layers were not in {word} at the end of a step"


def _layers(model: nn.Module) -> list[Float8Linear]:
    return [module for module in model.modules() if isinstance(module, Float8Linear)]
