"""Power: how often two one-sided tests pass, and how many runs that takes.

The paired gaps of n seeds are taken as independent and normal. Their mean is N(gap, sd^2 / n) and independent of their
sample sd, which is sd * chi(n - 1) / sqrt(n - 1). Given the sample sd, two one-sided tests pass where the mean keeps a
distance of t * sample sd / sqrt(n) from both ends of the margin; the power is the integral of that probability over the
sample sd. K. F. Phillips, Journal of Pharmacokinetics and Biopharmaceutics 18 (1990) 137-144.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from harness.store.loss_limits import MIN_SEEDS
from harness.store.stats import t_quantile

ALPHA = 0.04  # of each of the two one-sided tests that PASS needs: under 5 %, since the window is chosen from the data
POWER = 0.8
MOST = 200  # seeds that are tried
_NODES = np.polynomial.legendre.leggauss(200)  # 5 digits, by comparison with an integral over the density


def tost_power(sd: float, margin: float, seeds: int, gap: float = 0.0, sides: int = 1) -> float:
    """Probability that two one-sided tests at `ALPHA` each pass.

    >>> round(tost_power(0.5, 1.0, 5), 2), round(tost_power(1.0, 1.0, 11), 2)
    (0.92, 0.81)

    Args:
        sd: of the paired gaps between seeds, in any unit; above 0.
        margin: of equivalence, in that unit.
        seeds: at least 2.
        gap: the true one, in that unit.
        sides: 2 for the difference of two means of so many unpaired runs, each with that sd; `sd` is then of the runs.
    """
    from scipy.special import gammaincinv, ndtr

    # Of Welch's test on two sides with one spread: (v1 + v2)^2 / (v1^2 + v2^2) is 2 n / (n + 1) in the mean.
    degrees = (seeds - 1) * (1 if sides == 1 else 2 * seeds / (seeds + 1))
    scale = math.sqrt(seeds / sides) / sd
    nodes, weights = _NODES  # of the probability of a sample sd
    ratio = np.sqrt(2 * gammaincinv(degrees / 2, (1 + nodes) / 2) / degrees)  # of sample sd / sd
    room = (
        margin * scale - t_quantile(1 - ALPHA, degrees) * ratio
    )  # of the mean, in its own standard deviations
    passes = ndtr(room - gap * scale) - ndtr(-room - gap * scale)
    return float((weights * np.maximum(passes, 0)).sum() / 2)


def seeds_for(sd: float, margin: float, gap: float = 0.0, sides: int = 1) -> int | None:
    """Fewest seeds with which two one-sided tests at `ALPHA` pass with a probability of at least `POWER`.

    >>> seeds_for(sd=1.0, margin=1.0), seeds_for(sd=0.25, margin=1.0)
    (11, 3)

    Args:
        sd: of the paired gaps between seeds, in any unit.
        margin: of equivalence, in that unit.
        gap: the true one, in that unit.
        sides: as of `tost_power`.

    Returns:
        At least `MIN_SEEDS`, below which nothing is judged; None where `MOST` are too few.
    """
    counts = range(MIN_SEEDS, MOST + 1)
    at = bisect_left(counts, POWER, key=lambda n: tost_power(sd, margin, n, gap, sides))
    return counts[at] if at < len(counts) else None


def runs_needed(sd: float, margin: float, sides: int = 1) -> tuple[int | None, int | None]:
    """`seeds_for` without a gap, and at a gap of half a margin."""
    return seeds_for(sd, margin, 0.0, sides), seeds_for(sd, margin, margin / 2, sides)
