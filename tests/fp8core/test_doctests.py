"""Every example in a docstring of fp8core runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fp8core

MODULES = [fp8core.__name__, *(m.name for m in pkgutil.walk_packages(fp8core.__path__, "fp8core."))]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted or name not in ("fp8core", "fp8core.scaling", "fp8core.tensor")
