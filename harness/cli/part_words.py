"""The command lines of parts, checked before the first one is started. No torch: a suite checks values of axes, arms and shapes later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.config import load
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.engine.parts import Part


def refuse_unusable(parts: Sequence[Part], device: str, more: Sequence[str], rehearsed: bool) -> None:
    """Composes the command line of each part, 0.1 s each.

    Args:
        parts: of the sweep.
        device: that they run on.
        more: words that every part is given.
        rehearsed: in their small sizes.

    Raises:
        UsageError: names the part, with an unknown sweep, key, axis or value.
    """
    for part in parts:
        runs = [] if rehearsed else [f"{key}={name}" for key, name in part.runs.items()]
        words = [*part.words(rehearsed=rehearsed), *runs, f"device={device}", *more]
        try:
            load(words, lambda device: device)
        except UsageError as error:
            raise UsageError(f"part {part.name}: {error}") from error
