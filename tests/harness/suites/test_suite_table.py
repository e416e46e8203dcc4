"""The table of suites, and what a mistyped request imports. Oracle: `sys.modules` of a fresh process; files of the folder."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from harness import suites

ASKED = """
import sys
from harness.suites import NAMES, SUITES
assert list(SUITES) == list(NAMES) and len(SUITES) == len(NAMES)
assert all(name in SUITES for name in NAMES)
assert "tot" not in SUITES and SUITES.get("tot") is None
print(sorted(m for m in sys.modules if m == "torch" or m.startswith("harness.suites.")))
"""
MISTYPED = """
import sys
from harness.__main__ import main
print(main(["sweep=gemn"]), "torch" in sys.modules)
"""


def output(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_table_answers_names_without_importing_a_suite() -> None:
    assert output(ASKED) == ["[]"]


def test_a_name_that_no_suite_has_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="tot"):
        suites.SUITES["tot"]


def test_names_are_the_modules_that_build_or_run_cases() -> None:
    folder = Path(suites.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    measuring = {m for m in modules if hasattr(importlib.import_module(f"harness.suites.{m}"), "ARMS")}
    assert set(suites.NAMES) == measuring


def test_a_mistyped_sweep_imports_no_torch() -> None:
    assert output(MISTYPED)[-1] == "2 False"
