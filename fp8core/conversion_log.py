"""One line in the log for each conversion: what became FP8, what did not, and that nothing is proven yet."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOG = logging.getLogger("fp8core")
_SHOWN = 3  # names beside a reason


def log_conversion(recipe: str, converted: list[str], skipped: Mapping[str, str]) -> None:
    """Logs at level INFO, once in each process that converts.

    Args:
        recipe: that was asked for.
        converted: names of the layers that run it.
        skipped: name -> reason, of those that don't.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in skipped.items():
        by_reason[reason].append(name or "the model")
    parts = [
        f"{len(names)} skipped ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}): {reason}"
        for reason, names in by_reason.items()
    ]
    rank = f"rank {dist.get_rank()}: " if dist.is_available() and dist.is_initialized() else ""
    total = len(converted) + len(skipped)
    _LOG.info(
        "%s%d of %d Linear layers converted to FP8, recipe %s%s; not yet proven: call verify",
        rank,
        len(converted),
        total,
        recipe,
        "".join(f"; {part}" for part in parts),
    )
