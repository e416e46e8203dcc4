"""Runs a study that measures: a suite of its own in its module, and the sweep beside it, in the harness's own command.

    python reports/studies/outliers.py device=cpu      # any key of a sweep; rows, log and report as of any other

The suite is no part of the harness, so worker processes would not find it: a study measures in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.__main__ import main
from harness.suites import SUITES

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(name: str, suite: Any, words: Sequence[str]) -> int:
    """Measure a suite under its name; return the exit code of `python -m harness sweep=NAME`.

    Args:
        name: of the suite, of its sweep's file here, and in rows.
        suite: the module.
        words: of the command line.
    """
    SUITES[name] = suite
    return main([f"sweep={name}", f"config_dir={Path(__file__).parent}", "isolate=false", *words])
