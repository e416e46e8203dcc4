"""Compiler state: configurations and stance of `torch.compile`, as overrides of what torch starts with.

Read only where torch has imported the module already; until then nobody has set anything in it. Of a list or dict
in it a shallow copy is compared.
"""

from __future__ import annotations

import copy
import sys
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

# `torch.compiler.config` holds aliases of these, and a few settings of its own.
CONFIGS = {
    "dynamo_config": "torch._dynamo.config",
    "inductor_config": "torch._inductor.config",
    "functorch_config": "torch._functorch.config",
    "compiler_config": "torch.compiler.config",
}
_EVAL_FRAME = "torch._dynamo.eval_frame"


class Overrides(NamedTuple):
    """Settings of one module that differ from their defaults: name -> value, sorted."""

    by_name: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.by_name)


def overrides(module_name: str) -> Overrides:
    """What is set in a module of torch's configuration; some 20 us for the 600 settings of inductor."""
    module = sys.modules.get(module_name)
    if module is None:
        return Overrides()
    own = []
    for name, get, default in _entries(module):
        value = get()
        # Reading a list makes it an override that equals the default.
        if type(value) is not object and value != default:
            own.append((name, copy.copy(value) if isinstance(value, list | dict | set) else value))
    return Overrides(tuple(own))


@cache
def _entries(module: Any) -> list[tuple[str, Callable[[], Any], Any]]:
    """Settings of a module that are no aliases: name, what reads its override, default; none of a torch that keeps them otherwise."""
    return [
        (
            name,
            entry.user_override.get
            if isinstance(entry.user_override, ContextVar)
            else partial(getattr, entry, "user_override"),
            entry.default,
        )
        for name, entry in getattr(module, "_config", {}).items()
        if getattr(entry, "alias", None) is None and hasattr(entry, "user_override")
    ]


def set_overrides(module_name: str, wanted: Overrides) -> None:
    """Set these, and reset all others of the module."""
    module = sys.modules.get(module_name)
    if module is None:
        return
    values = dict(wanted.by_name)
    now = dict(overrides(module_name).by_name)
    for name in now.keys() - values.keys():
        delattr(module, name)  # an unset setting is its default, or the environment's
        module._config[name].hide = False  # else it would not exist
    for name, value in values.items():
        if name not in now or now[name] != value:
            setattr(module, name, value)


def stance() -> Any:
    """The stance of `torch.compiler.set_stance`; None for the default one."""
    module = sys.modules.get(_EVAL_FRAME)
    return None if module is None or module._stance == module.DynamoStance() else module._stance


def set_stance(value: Any) -> None:
    """Set what `stance` has returned."""
    module = sys.modules.get(_EVAL_FRAME)
    if module is not None:
        module._set_stance(module.DynamoStance() if value is None else value)
