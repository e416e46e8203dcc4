"""One finding among links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkOutlier:
    """A link, or all links of an end, that is out of line.

    Attributes:
        what: slow link, slow end, slow direction, no NVLink or corrupt.
        names: sender and receiver of the slower direction, or the end; of a corrupt one all that took part.
        link: kind.
        size: bytes of the message; 0 where no time is meant.
        off: seconds over the middle (of a direction: over the other one), minus 1; 0 where no time is meant.
        reason: the figures.
    """

    what: str
    names: tuple[str, ...]
    link: str
    size: int
    off: float
    reason: str
