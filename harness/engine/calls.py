"""Calls: what a process of an arm is asked to do, as JSON: a function by its name, and its arguments.

{"call": [MODULE, NAME], "args": [VALUE, ...]}
a case    {"case": ID, "suite": MODULE, "point": [SUITE, {AXIS: VALUE}, SEED]}
a folder  {"folder": PATH}
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.engine.plan import PlannedCase
from harness.store.case import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

VERSION = 2  # changes with the meaning of a message
Message = dict[str, Any]


def message(fn: Callable[..., Any], args: Sequence[Any]) -> Message:
    """What asks for a call.

    Args:
        fn: of a module.
        args: JSON values that are no objects, paths, and cases of suites that are modules.

    Raises:
        TypeError: another process could not find the function or the suite by its name.
    """
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} has no name in its module")
    return {"call": [fn.__module__, fn.__qualname__], "args": [*map(as_data, args)]}


def as_data(value: Any) -> Any:
    """A value as a message has it."""
    if isinstance(value, Path):
        return {"folder": str(value)}
    if not isinstance(value, PlannedCase):
        return value
    case, suite = value.case, value.suite
    if not isinstance(suite, ModuleType):
        raise TypeError(
            f"suite {case.suite} is of type {type(suite).__name__}, which has no name; expected a module"
        )
    point = [case.suite, dict(case.axes), case.seed]
    return {"case": case.case_id, "suite": suite.__name__, "point": point}


def called(asked: Message) -> tuple[Callable[..., Any], list[Any]]:
    """The function that a message names, and its arguments."""
    module, name = asked["call"]
    return getattr(importlib.import_module(module), name), [*map(_value, asked["args"])]


def _value(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return Path(given["folder"]) if "folder" in given else _case(given)


def _case(given: Mapping[str, Any]) -> PlannedCase:
    suite: Any = importlib.import_module(given["suite"])
    return PlannedCase("", suite, Case.of(*given["point"]), ())
