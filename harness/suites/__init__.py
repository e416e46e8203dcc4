"""Suites: what is measured, each with its oracle. Imported on use; to add one: its module here, and its axes in `axes.yaml`.

From another package, an entry point of the group `fp8_harness.suites` that names a module.
"""

from __future__ import annotations

import importlib
import sys
from collections import UserDict
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.store import extensions
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from fp8core.extensions import ExtensionTable
    from harness.timing.workload import Axis

_AXES = beside(__file__, "axes.yaml")
NAMES: dict[str, tuple[str, ...]] = {suite: tuple(axes) for suite, axes in _AXES.items()}


def axes_of(suite: str, **of_code: Collection[str]) -> Mapping[str, Axis]:
    """The axes of a suite, from `axes.yaml`.

    Args:
        suite: its name.
        of_code: the choices of some axes, as the names of a table; an axis without words of its own is told by the table's.
    """
    from harness.timing.workload import Axis

    found = {}
    for name, fields in _AXES[suite].items():
        choices = of_code.get(name, fields.get("choices", ()))
        own: dict[str, Any] = {"choices": tuple(choices), "words": tuple(fields.get("words", ()))}
        if "doc" not in fields:
            assert isinstance(choices, Mapping)
            own["doc"] = "; ".join(f"{choice}: {doc}" for choice, doc in choices.items())
        found[name] = Axis(**{**fields, **own})
    return found


class _Suites(UserDict[str, Any]):
    """Suites by name, each a `Suite` or `TrialSuite`; one is imported, and torch with it, when it is asked for."""

    def __missing__(self, name: str) -> Any:
        if name in NAMES:
            self.data[name] = importlib.import_module(f"{__name__}.{name}")
            return self.data[name]
        if name in extensions.names("suites"):
            return self.others[name]
        raise KeyError(name)

    def __setitem__(self, name: str, suite: Any) -> None:
        _refuse_while_importing(name)
        super().__setitem__(name, suite)

    def __delitem__(self, name: str) -> None:
        _refuse_while_importing(name)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*NAMES, *self.data, *extensions.names("suites")]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in set(self)  # without importing it

    def axis_names(self, name: str) -> tuple[str, ...] | None:
        """Axes of a suite without importing it; None of one that another package brings."""
        return tuple(self.data[name].AXES) if name in self.data else NAMES.get(name)

    @cached_property
    def others(self) -> ExtensionTable[Any]:
        """The suites that other packages bring."""
        from fp8core.extensions import ExtensionTable

        return ExtensionTable("suites", {}, _fault, NAMES)


def _refuse_while_importing(name: str) -> None:
    # Extensions are imported by that module alone; importing it here would import torch
    if (loaded := sys.modules.get("fp8core.extensions")) is not None:
        loaded.refuse_while_importing("suites", name)


def _fault(name: str, made: object) -> str:
    """Workers find a suite by its module's name, so an object in a module would not reach them."""
    from harness.timing.workload import Suite, TrialSuite

    if not isinstance(made, ModuleType):
        return f"it is of type {type(made).__name__}; expected a module: name it without ':attribute'"
    lacks = [word for word in ("AXES", "ARMS", "points", "unsupported", "work") if not hasattr(made, word)]
    lacks += [] if isinstance(made, Suite | TrialSuite) or lacks else ["build or trial"]
    return f"the module lacks {', '.join(lacks)}" if lacks else ""


SUITES = _Suites()
