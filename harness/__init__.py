"""harness: measures fp8core, its peers and bf16 in one run, and keeps every number with its conditions.

In a training loop of your own: `from harness import ab`, see `harness.training.ab`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.training import ab

__all__ = ["ab"]


def __getattr__(name: str) -> Any:
    """`ab` on use: it needs torch, and what reads stored results does not."""
    if name == "ab":
        return importlib.import_module("harness.training.ab")
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
