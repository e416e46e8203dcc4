"""The table of suites, and what a mistyped request imports. Oracle: `sys.modules` of a fresh process; files of the folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
print(main(sys.argv[1:]), "torch" in sys.modules)
"""


def output(script: str, *words: str) -> list[str]:
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_table_answers_names_without_importing_a_suite() -> None:
    assert output(ASKED) == ["[]"]


@pytest.mark.parametrize(
    "words",
    [
        ["sweep=gemn"],
        ["sweep=cast", "axes.MM=3"],
        ["sweep=quick", "axes.MM=3", "device=cpu"],
        ["sweep=quick", "parts.gemm.axes.MM=3", "device=cpu"],
        ["-m", "sweep=cast", "axes.MM=3", "shard=0/2,1/2"],
    ],
)
def test_a_mistyped_name_imports_no_torch(words: list[str]) -> None:
    assert output(MISTYPED, *words)[-1] == "2 False"
