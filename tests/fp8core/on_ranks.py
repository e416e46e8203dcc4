"""Tests whose body runs in several ranks, each of which asserts for itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from harness.machine import ranks

Test = Callable[..., None]


def on_ranks(world: int) -> Callable[[Test], Test]:
    """Runs a test in so many ranks of gloo, or in as many as its parameter `world` says."""

    def decorate(fn: Test) -> Test:
        @functools.wraps(fn)
        def test(**parameters: Any) -> None:
            size = parameters.get("world", world)
            ranks.run(_run, size, fn.__module__, fn.__name__, parameters, timeout_s=400)

        return test

    return decorate


def _run(module: str, name: str, parameters: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    inspect.unwrap(getattr(importlib.import_module(module), name))(**parameters)
