"""How often the rule of `harness.fleet.judge` is wrong: the table of docs/fleet.md, by simulation.

python -m harness.fleet.rates
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from harness.fleet.judge import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAWS = 10_000
TOLERANCE = 0.05
SIZES = (3, 4, 8, 64)  # cards
SPREADS = (0.005, 0.01, 0.02)  # standard deviation of the scores of healthy cards
SLOWER = (0.06, 0.08, 0.12)


def rate(cards: int, spread: float, slower: float, draws: int = DRAWS) -> float:
    """Share of fleets in which the rule finds something: any card of a healthy fleet, else the slower one.

    Args:
        cards: of the fleet.
        spread: standard deviation of the scores of healthy cards, as a logarithm.
        slower: share by which the first card takes longer; 0 for a healthy fleet.
        draws: fleets.
    """
    scores = np.random.default_rng(cards).normal(0.0, spread, (draws, cards))
    scores[:, 0] += np.log1p(slower)
    middle, limit = limits(scores, TOLERANCE)
    found = np.abs(scores - middle[:, None]) > limit[:, None]
    return float((found[:, 0] if slower else found.any(axis=1)).mean())


def lines() -> Iterator[str]:
    """The table in markdown."""
    heads = [f"{slower:.0%} slower" for slower in SLOWER]
    yield f"| cards | spread of healthy cards | false alarm, any card | {' | '.join(heads)} |"
    yield "|---|---|---|" + "---|" * len(heads)
    for cards in SIZES:
        for spread in SPREADS:
            cells = [f"{100 * rate(cards, spread, slower):.1f} %" for slower in (0.0, *SLOWER)]
            yield f"| {cards} | {spread:.1%} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
