"""harness: measures fp8core, its peers and bf16 in one run, and keeps every number with its conditions.

In code of your own: `from harness import ab` (`harness.training.ab`) for a training loop, `harness.measure` for functions,
`harness.agree` for two precisions of one model, `harness.verdict` for loss curves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.judge.verdict.rule import verdict
    from harness.timing.closures import measure
    from harness.training import ab
    from harness.training.agree import agree

__all__ = ["__version__", "ab", "agree", "measure", "verdict"]
__version__ = "0.1.0"
_FUNCTIONS = {"agree": "training.agree", "measure": "timing.closures", "verdict": "judge.verdict.rule"}


def __getattr__(name: str) -> Any:
    """These on use: they need torch or pandas, and what reads stored results does not."""
    if name == "ab":
        return importlib.import_module("harness.training.ab")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"harness.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
