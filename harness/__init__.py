"""harness: measures fp8core, its peers and bf16 in one run, and keeps every number with its conditions.

In code of your own: `from harness import ab` (`harness.training.ab`) for a training loop, `harness.measure` for functions,
`harness.agree` for two precisions of one model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.timing.closures import measure
    from harness.training import ab
    from harness.training.agree import agree

__all__ = ["__version__", "ab", "agree", "measure"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """These on use: they need torch, and what reads stored results does not."""
    if name == "ab":
        return importlib.import_module("harness.training.ab")
    if name == "measure":
        return importlib.import_module("harness.timing.closures").measure
    if name == "agree":
        return importlib.import_module("harness.training.agree").agree
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
