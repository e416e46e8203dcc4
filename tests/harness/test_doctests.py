"""Every example in a docstring of the harness runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import harness

MODULES = [
    m.name for m in pkgutil.walk_packages(harness.__path__, "harness.") if not m.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
