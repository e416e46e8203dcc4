"""Replaces a Linear by another module of the same parameters without losing what was attached to it.

`loss_reason` says what a replacement would lose; `take_over` moves what it can keep: parameters, hooks with their
handles, training mode and attributes of the instance.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

if TYPE_CHECKING:
    from collections.abc import Iterable

WHY_NOT = "_fp8core_not_converted"  # attribute of a module that a conversion left alone: the reason
NEVER_OFFERED = "never offered to convert_to_float8_training"
FILTERED = "left out by module_filter_fn"

_CALLED = ("forward", "__call__", "_call_impl")
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name or name == "_is_full_backward_hook")
_FAST = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
_KEPT_FAST = "_fp8core_kept_fast"
_MODULE = frozenset(vars(nn.Linear(1, 1, device="meta")))


def loss_reason(linear: nn.Linear, convert_subclasses: Iterable[type[nn.Linear]] = ()) -> str:
    """What would be lost if a Float8Linear took this layer's place; "" if nothing.

    Args:
        linear: an nn.Linear or of a subclass.
        convert_subclasses: classes whose own forward computes what nn.Linear's does, so that it may be replaced; their
            subclasses that inherit it too.
    """
    kind = type(linear)
    if kind is NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention reads the weight of its out_proj without calling the layer"
    patched = [name for name in _CALLED if name in vars(linear)]
    if patched:
        return f"its {patched[0]} was replaced on the instance and would be lost; convert before that"
    if not any(issubclass(kind, c) and kind.forward is c.forward for c in convert_subclasses):
        own = [name for name in _CALLED if getattr(kind, name) is not getattr(nn.Linear, name)]
        if own:
            return (
                f"class {kind.__name__} has its own {own[0]}, which would be lost; if it computes what nn.Linear's does, "
                f"pass convert_subclasses=({kind.__name__},)"
            )
    if linear._modules:
        return f"its child {next(iter(linear._modules))!r} would be lost"
    more = [*(linear._parameters.keys() - {"weight", "bias"}), *linear._buffers]
    if more:
        return f"its {more[0]!r} beside weight and bias would be lost"
    if linear.weight.is_meta and kind.reset_parameters is not nn.Linear.reset_parameters:
        return (
            f'it lies on "meta" and class {kind.__name__} has its own reset_parameters, which would be lost; convert after '
            "initialisation"
        )
    return ""


def take_over(new: nn.Linear, old: nn.Linear, drop_hooks_of: str = "") -> None:
    """Moves parameters, hooks, training mode and other attributes of the instance from `old`, which has no hooks then.

    Handles that `register_forward_hook` and its like returned go on removing their hooks.

    Args:
        new: of the same sizes.
        old: the layer whose place it takes.
        drop_hooks_of: a package whose own hooks are not moved.
    """
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(old, name))
    for name in _HOOKS:
        hooks = getattr(old, name)
        setattr(new, name, hooks)
        if not isinstance(hooks, OrderedDict):
            continue
        setattr(old, name, OrderedDict())
        for key, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)
            if drop_hooks_of and str(getattr(function, "__module__", "")).startswith(f"{drop_hooks_of}."):
                del hooks[key]
            elif getattr(hook, "with_module", False):
                hook.module = weakref.ref(new)  # torch gives this hook the module that it was registered with
    for name, value in _own_attributes(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    new.train(old.training)


def keep_from_fast_path(model: nn.Module) -> None:
    """Has torch's encoders call their Linear layers in inference too, where one is converted, and not where none is.

    In eval mode without gradients `nn.TransformerEncoderLayer` multiplies their weights itself, in high precision, if its
    activation is one that this fast path has; `nn.TransformerEncoder` then drops padded tokens by nested tensors, which
    nothing but that path takes.
    """
    for module in model.modules():
        for kind, switch in _FAST.items():
            if isinstance(module, kind):
                kept = vars(module).pop(_KEPT_FAST, getattr(module, switch))
                converted = any(
                    isinstance(child, nn.Linear) and hasattr(child, "recipe") for child in module.modules()
                )
                setattr(module, switch, 0 if converted else kept)
                if converted:
                    vars(module)[_KEPT_FAST] = kept


def _own_attributes(linear: nn.Linear) -> dict[str, Any]:
    """What was set on the instance beyond nn.Linear's own, and beyond what Float8Linear keeps there."""
    ours: frozenset[str] = getattr(type(linear), "STATE", frozenset())
    return {
        name: value
        for name, value in vars(linear).items()
        if name not in _MODULE and name not in ours and not name.startswith("_fp8core")
    }
