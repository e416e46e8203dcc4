"""docs/migrate-from-torchao.md: a line for each public name of torchao.float8, each line true, each snippet runs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import forked
import pytest

import fp8core
from fp8core.torchao_compat import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "migrate-from-torchao.md"
VERDICTS = ("same", "different", "absent")
_NOT_NAMES = ("logger", "log", "annotations", "TYPE_CHECKING")  # loggers, and what the interpreter needs


def lines() -> dict[str, str]:
    """The verdict on each name, relative to torchao.float8."""
    found = {}
    for cells in re.findall(r"^\| (`.*?`) \| (\w+) \|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", cells[0]):
            assert name not in found, f"{name} has two lines"
            found[name] = cells[1]
    return found


def public(module: ModuleType) -> set[str]:
    """What a module defines without an underscore, and all that `__all__` names."""
    names = set(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value) or name in _NOT_NAMES:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            if value.__module__ == module.__name__:
                names.add(name)
        elif not str(getattr(value, "__module__", "")).startswith("typing"):
            names.add(name)
    return names


def torchaos() -> set[str]:
    package = pytest.importorskip("torchao.float8")
    names = set(package.__all__)
    for found in pkgutil.iter_modules(package.__path__):
        if not found.name.startswith("_"):
            module = importlib.import_module(f"torchao.float8.{found.name}")
            names |= {f"{found.name}.{name}" for name in public(module)}
    return names


def test_every_public_name_of_torchao_has_a_line() -> None:
    """Oracle: torchao's modules as installed."""
    table = lines()
    assert set(table.values()) <= set(VERDICTS)
    missing = torchaos() - table.keys()
    assert not missing, f"no line in {PAGE.name}: {sorted(missing)}"
    known = torchaos() | {
        "types.FP8Granularity",
        *(f"float8_linear_utils._auto_filter_for_{name}" for name in ("recipe", "rowwise", "tensorwise")),
    }
    assert table.keys() <= known, f"not torchao's: {sorted(table.keys() - known)}"


def test_what_the_page_calls_present_is_what_install_gives() -> None:
    given = {
        f"{module}.{name}".removeprefix("torchao.float8.")
        for module, names in NAMES.items()
        for name in names
    }
    given |= {"config.e4m3_dtype", "config.e5m2_dtype", "fsdp_utils.WeightWithDynamicFloat8CastTensor"}
    present = {name for name, verdict in lines().items() if verdict != "absent"}
    assert present == given
    assert all(hasattr(fp8core, name) for names in NAMES.values() for name in names)


def test_the_same_names_take_the_same_arguments() -> None:
    """Oracle: torchao's signatures, fields and members."""
    for name in sorted(n for n in torchaos() if lines()[n] != "absent"):
        module, _, attribute = f"torchao.float8.{name}".rpartition(".")
        theirs = getattr(importlib.import_module(module), attribute)
        ours = getattr(fp8core, attribute, None)
        if ours is None:  # dtypes, and the class of sharded weights
            continue
        if isinstance(theirs, type) and issubclass(theirs, importlib.import_module("enum").Enum):
            assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
        elif dataclasses.is_dataclass(theirs):
            assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
        elif inspect.isfunction(theirs) or inspect.isclass(theirs):
            theirs, mine = (
                {n for n, p in inspect.signature(f).parameters.items() if p.kind.name[:3] != "VAR"}
                for f in (theirs, ours)
            )
            assert theirs <= mine, name


def test_the_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 4
    code = "\n".join(snippets)
    done = forked.run(["-c", code])
    assert done.returncode == 0, done.stderr
