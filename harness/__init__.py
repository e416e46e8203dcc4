"""harness: measures fp8core, its peers and bf16 in one run, and keeps every number with its conditions.

In code of your own: `from harness import ab` (`harness.training.ab`) for a training loop, `harness.measure` for functions,
`harness.verdict` for loss curves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.judge.curve_verdict import verdict
    from harness.timing.closures import measure
    from harness.training import ab

__all__ = ["__version__", "ab", "measure", "verdict"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """These on use: torch is not needed by what reads stored results, nor pandas by `--help`."""
    if name == "ab":
        return importlib.import_module("harness.training.ab")
    if name == "measure":
        return importlib.import_module("harness.timing.closures").measure
    if name == "verdict":
        return importlib.import_module("harness.judge.curve_verdict").verdict
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
