"""Whether an optimizer trains what a conversion has put in place.

A conversion leaves parameters as they are, but where FSDP2 is to gather weights as codes: these become new ones, and an
optimizer that was made before goes on with the old, which get no gradients. The first step of such an optimizer warns.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    import torch

_REPLACED = "_fp8core_replaced"  # on a parameter: the name of the layer that it was the weight of
_LOOKED_AT: weakref.WeakSet[Any] = weakref.WeakSet()
_HOOK: list[Any] = []


class NotTrainedWarning(UserWarning):
    """An optimizer holds parameters that a conversion has replaced."""


def replaced(old: torch.Tensor, fqn: str) -> None:
    """Notes that a layer has a new weight; the first step of each optimizer is looked at from now on."""
    setattr(old, _REPLACED, fqn)
    if not _HOOK:
        _HOOK.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: Any, *_: Any) -> None:
    if optimizer in _LOOKED_AT:
        return
    _LOOKED_AT.add(optimizer)
    names = [
        getattr(p, _REPLACED)
        for group in optimizer.param_groups
        for p in group["params"]
        if hasattr(p, _REPLACED)
    ]
    if names:
        warnings.warn(
            f"{type(optimizer).__name__} was made before the model was converted, and does not train the weights of "
            f"{len(names)} FP8 layers, which enable_fsdp_float8_all_gather made anew: {', '.join(names[:3])}; make the "
            "optimizer after convert_to_float8_training, or without FSDP2 leave the option out "
            "(accelerate: AORecipeKwargs(config=Float8LinearConfig()))",
            NotTrainedWarning,
            stacklevel=2,
        )
