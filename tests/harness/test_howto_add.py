"""docs/howto-add.md, from outside the tree. Oracles: the classes as their sources declare them, the tables, the template."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from harness.peers.peer import GEMM_RECIPES
from harness.store.extensions import TABLES
from harness.suites import gemm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto-add.md").read_text()
SECTION = PAGE.split("## From outside the tree")[1].split("\n## ")[0]


def printed() -> dict[str, str]:
    """What the section prints of each class, by its dotted name."""
    found: dict[str, str] = {}
    for block in re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE):
        _, *parts = re.split(r"^# ([\w.]+)\n", block, flags=re.MULTILINE)
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


def declared(text: str) -> dict[str, str]:
    """Fields and functions of a body of code by name, spelled in one way; `self` and decorators left out."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ast.unparse(node)
        elif isinstance(node, ast.FunctionDef):
            for arguments in (node.args.posonlyargs, node.args.args):
                arguments[:] = [argument for argument in arguments if argument.arg != "self"]
            found[node.name] = (
                f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns or ast.Constant(None))}"
            )
    return found


@pytest.mark.parametrize("name", printed())
def test_a_printed_signature_is_the_one_in_the_source(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (definition,) = ast.parse(inspect.getsource(getattr(importlib.import_module(module), attribute))).body
    assert isinstance(definition, ast.ClassDef)
    real = declared("\n".join(ast.unparse(node) for node in definition.body))
    shown = declared(printed()[name])
    assert shown
    assert shown == {each: real.get(each) for each in shown}


def test_the_section_and_the_template_have_every_table() -> None:
    groups = {f"fp8_harness.{table}" for table in TABLES}
    assert set(re.findall(r"^\| `(fp8_harness\.\w+)`", SECTION, re.MULTILINE)) == groups
    template = tomllib.loads((ROOT / "docs/examples/extension/pyproject.toml").read_text())
    assert set(template["project"]["entry-points"]) == groups


def test_products_of_peers_take_the_scales_of_the_suite_s_own_arms() -> None:
    own = {info.arm.recipe for info in gemm.ARMS.values() if not info.peer and info.arm.has_fp8}
    assert set(GEMM_RECIPES) == own
