"""docs/migrate-from-torchao.md: what it calls present is there and takes torchao's arguments; each snippet runs."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8core
from fp8core.torchao_compat import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "migrate-from-torchao.md"
VERDICTS = ("same", "different", "absent")


def lines() -> dict[str, str]:
    """The verdict on each name, relative to torchao.float8."""
    found = {}
    for cells in re.findall(r"^\| (`.*?`) \| (\w+) \|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", cells[0]):
            assert name not in found, f"{name} has two lines"
            found[name] = cells[1]
    return found


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


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_the_same_names_take_the_same_arguments(module: str, name: str) -> None:
    """Oracle: torchao's signatures, fields and members."""
    pytest.importorskip("torchao.float8")
    theirs, ours = getattr(importlib.import_module(module), name), getattr(fp8core, name)
    if isinstance(theirs, type) and issubclass(theirs, enum.Enum):
        assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
    elif dataclasses.is_dataclass(theirs):
        assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
    elif callable(theirs):
        want, got = (
            {n for n, p in inspect.signature(f).parameters.items() if p.kind.name[:3] != "VAR"}
            for f in (theirs, ours)
        )
        assert want <= got


def test_the_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 4
    code = "\n".join(snippets)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
