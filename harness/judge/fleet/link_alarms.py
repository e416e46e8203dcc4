"""How often the rule of links is wrong: the table of docs/fleet-links.md, by simulation. python -m harness.judge.fleet.link_alarms

The rounds of a link are taken to be alike, so that all of them are out of line where its median is: the rule at its most alarmed.
"""

from __future__ import annotations

import math
import random
import sys
from itertools import combinations
from typing import TYPE_CHECKING

from harness.judge.fleet.link_rule import TOLERANCE, Pair, Place, Score, out_of_line

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAWS = 2000
ENDS = (3, 4, 8)
SPREADS = (0.01, 0.05, 0.1)  # standard deviation of the scores of healthy links
SIZES = 2  # of messages, as in sweep=fleet
SLOWER = (0.5, 1.0, 9.0)  # share by which one link, or all links of one end, take longer


def rate(ends: int, spread: float, slower: float = 0.0, *, end: bool = False, draws: int = DRAWS) -> float:
    """Share of fleets in which the rule finds something: anything in a healthy one, else that link, or that end, and no other.

    Args:
        ends: that all have a link to each other.
        spread: standard deviation of the scores of healthy links.
        slower: share by which the first link takes longer; 0 for a healthy fleet.
        end: it is all links of the first end.
        draws: fleets.
    """
    draw, found = random.Random(ends), 0
    names: list[Place] = [(str(rank),) for rank in range(ends)]
    for _ in range(draws):
        seen: set[Place | Pair] = set()
        for _ in range(SIZES):
            scores: dict[Pair, Score] = {}
            for i, pair in enumerate(combinations(names, 2)):
                bad = slower if (names[0] in pair if end else i == 0) else 0.0
                x = draw.gauss(0.0, spread) + math.log1p(bad)
                scores[pair] = Score(x, x, x)
            said = out_of_line(scores, TOLERANCE, 2 * SIZES)
            seen |= {*said.ends, *said.links}
        found += bool(seen) if not slower else seen == {names[0] if end else (names[0], names[1])}
    return found / draws


def lines() -> Iterator[str]:
    """The table in markdown."""
    heads = [f"one link {slower:.0%} slower" for slower in SLOWER] + [f"one end {SLOWER[1]:.0%} slower"]
    yield f"| ends | links | spread of healthy links | false alarm | {' | '.join(heads)} |"
    yield "|---|---|---|---|" + "---|" * len(heads)
    for ends in ENDS:
        for spread in SPREADS:
            rates = [
                rate(ends, spread),
                *(rate(ends, spread, slower) for slower in SLOWER),
                rate(ends, spread, SLOWER[1], end=True),
            ]
            cells = " | ".join(f"{100 * one:.1f} %" for one in rates)
            yield f"| {ends} | {math.comb(ends, 2)} | {spread:.0%} | {cells} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
