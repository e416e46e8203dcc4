"""How far a card's score may lie from the middle one: the tolerance, made so wide that the rate of false alarms holds.

The tolerance is what cards that are well may differ by: 5 %, taken as 2.44 standard deviations of 2 %. A judgement
compares every card in every score, and what is rare in one comparison is likely in one of hundreds. So the tolerance is
widened until at most `RATE` of healthy fleets of that many cards and scores have any card out of line, if their scores are
normal, independent and spread by no more than that. Where the scores at hand spread further, 3.5 robust standard deviations
of them (1.4826 times the median absolute deviation; Iglewicz and Hoaglin, How to Detect and Handle Outliers, ASQC 1993)
are the limit; no rate is kept then. docs/fleet.md has the table (tests/studies/fleet_rates.py).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATE = 0.05  # of healthy fleets may have a card out of line
TOLERANCE_SDS = 2.44  # standard deviations of healthy cards in a tolerance: log(1.05) / 0.02
SIGMAS = 3.5
MAD_TO_SD = 1.4826  # of a normal distribution: 1 / quantile(0.75)
DRAWN = (
    2_000_000  # cards, in as many fleets as that makes, but `FEWEST`: the rate is met to a tenth of itself
)
FEWEST = 4000


def limits(
    scores: NDArray[np.float64], tolerance: float, of: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The middle score of each fleet and how far a card's may be from it.

    Args:
        scores: [fleets, cards], logarithms.
        tolerance: deviation that is no fault, 0.05 for 5 %.
        of: scores that each card is judged by, this one among them.
    """
    middle, sd = _robust(scores)
    return middle, np.maximum(widening(scores.shape[1], of) * math.log1p(tolerance), SIGMAS * sd)


@functools.cache
def widening(cards: int, of: int) -> float:
    """The factor on the logarithm of the tolerance that keeps `RATE`, by simulation; at least 1.

    Args:
        cards: of the fleet, at least 2.
        of: scores that each is judged by, at least 1.
    """
    shape = max(FEWEST, DRAWN // cards), cards
    scores = np.random.default_rng([cards, of]).normal(0.0, 1 / TOLERANCE_SDS, shape)
    middle, sd = _robust(scores)
    furthest = np.abs(scores - middle[:, None]).max(axis=1)
    needed = np.where(furthest > SIGMAS * sd, furthest, 0.0)
    return max(1.0, float(np.quantile(needed, (1 - RATE) ** (1 / of))))


def _robust(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Median and standard deviation of each fleet, robust to a minority of its cards."""
    middle = np.median(scores, axis=1)
    return middle, MAD_TO_SD * np.median(np.abs(scores - middle[:, None]), axis=1)
