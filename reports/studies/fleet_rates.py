"""How often the rule of `harness.judge.fleet` is wrong: the table of docs/fleet.md, by simulation.

python reports/studies/fleet_rates.py
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.fleet import limit

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAWS = 10_000
TOLERANCE = 0.05
SIZES = (2, 3, 4, 8, 64)  # cards
SPREADS = (0.005, 0.01, 0.02, 0.03)  # standard deviation of the scores of healthy cards
SLOWER = (0.06, 0.08, 0.12, 0.2)
SCORES = 6  # of sweep=fleet on a GPU: three suites, isolated and sustained; checksums are a seventh, which are equal


def rate(cards: int, spread: float, slower: float, scores: int = SCORES, draws: int = DRAWS) -> float:
    """Share of fleets in which the rule finds something: any card of a healthy fleet by any score, else the slower one.

    Args:
        cards: of the fleet.
        spread: standard deviation of the scores of healthy cards, as a logarithm.
        slower: share by which the first card takes longer, by one of its scores; 0 for a healthy fleet.
        scores: that each card is judged by, independent of one another.
        draws: fleets.
    """
    random, found = np.random.default_rng(cards), np.zeros(draws, dtype=bool)
    for _ in range(1 if slower else scores):
        drawn = random.normal(0.0, spread, (draws, cards))
        drawn[:, 0] += np.log1p(slower)
        off = np.abs(drawn - np.median(drawn, axis=1)[:, None])
        out = off > limit(cards, scores + 1, TOLERANCE)
        found |= out[:, 0] if slower else out.any(axis=1)
    return float(found.mean())


def lines() -> Iterator[str]:
    """The table in markdown."""
    heads = [f"{slower:.0%} slower" for slower in SLOWER]
    yield f"| cards | limit | spread of healthy cards | false alarm, any card, any score | {' | '.join(heads)} |"
    yield "|---|---|---|---|" + "---|" * len(heads)
    for cards in SIZES:
        most = math.expm1(limit(cards, SCORES + 1, TOLERANCE))
        for spread in SPREADS:
            cells = [f"{100 * rate(cards, spread, slower):.1f} %" for slower in (0.0, *SLOWER)]
            yield f"| {cards} | {most:.1%} | {spread:.1%} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
