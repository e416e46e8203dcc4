"""The table of suites, and what a mistyped request imports. Oracle: `sys.modules` of a fresh process; files of the folder."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import sys
from harness.suites import NAMES, SUITES
assert list(SUITES) == list(NAMES) and len(SUITES) == len(NAMES)
assert all(name in SUITES for name in NAMES)
assert "tot" not in SUITES and SUITES.get("tot") is None
assert not [m for m in sys.modules if m == "torch" or m.startswith("harness.suites.")]
from harness.__main__ import main
for words in (
    ["sweep=gemn"],
    ["sweep=cast", "axes.MM=3"],
    ["sweep=quick", "axes.MM=3", "device=cpu"],
    ["sweep=quick", "parts.gemm.axes.MM=3", "device=cpu"],
    ["-m", "sweep=cast", "axes.MM=3", "shard=0/2,1/2"],
):
    assert (main(words), "torch" in sys.modules) == (2, False), words
"""


def test_neither_the_table_of_names_nor_a_mistyped_one_imports_a_suite_or_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
