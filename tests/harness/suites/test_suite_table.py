"""The table of suites, and what a mistyped request imports. Oracle: `sys.modules` of a fresh process; files of the folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.cli import config
from harness.store.errors import UsageError

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


def test_axes_are_checked_where_the_suite_is_known_and_else_left_to_the_plan() -> None:
    own = {"suite": "cast", "axes": {"MM": 3}}
    with pytest.raises(UsageError, match=r"unknown axis 'MM' \(nearest: M\)"):
        config.refuse_unknown({**own, "parts": {}})
    with pytest.raises(UsageError, match="unknown axis 'MM'"):
        config.refuse_unknown({"axes": {"MM": 3}, "parts": {"cast": {"suite": "cast", "axes": {}}}})
    for open_still in (
        {"suite": "another package's", "axes": {"MM": 3}, "parts": {}},
        {"suite": "cast", "axes": {"role": None}, "parts": {}},  # what another sweep has set, unset
        {"suite": "cast", "axes": "${other}", "parts": {}},
        {"suite": None, "axes": {}, "parts": {"a": "${other}"}},
        {"axes": {"MM": 3}, "parts": {"a": own | {"axes": {}}, "b": {"suite": "${c}", "axes": {"MM": 3}}}},
    ):
        config.refuse_unknown(open_still)
