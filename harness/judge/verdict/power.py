"""Power: how many seeds two one-sided tests need before they can pass.

The paired gaps of n seeds are taken as independent and normal. Their mean is N(gap, sd^2 / n) and independent of their
sample sd, which is sd * chi(n - 1) / sqrt(n - 1). Given the sample sd, the tests pass where the mean keeps a distance of
t * sample sd / sqrt(n) from both ends of the margin; the power is the integral of that probability over the sample sd.
K. F. Phillips, Journal of Pharmacokinetics and Biopharmaceutics 18 (1990) 137-144.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.result import ALPHA, MIN_SEEDS
from harness.store.stats import t_quantile

if TYPE_CHECKING:
    from harness.store.stats import Vector

_NODES = 200  # of the Gauss-Legendre rule: 12 digits, by comparison with 2,000
_SPREADS = 12.0  # the chi density is integrated this many standard deviations around its centre


def tost_power(sd: float, margin: float, seeds: int, gap: float = 0.0) -> float:
    """Probability that two one-sided tests at `ALPHA` each pass.

    >>> round(tost_power(0.5, 1.0, 5), 2), round(tost_power(1.0, 1.0, 10), 2)
    (0.95, 0.8)

    Args:
        sd: of the paired gaps between seeds, in any unit.
        margin: of equivalence, in that unit.
        seeds: at least 2.
        gap: the true one, in that unit.

    Raises:
        ValueError: an sd or margin that is not above 0, or fewer than 2 seeds.
    """
    for name, value in (("sd", sd), ("margin", margin)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}: expected a finite number above 0")
    if seeds < 2 or not math.isfinite(gap):
        raise ValueError(f"seeds={seeds}, gap={gap}: expected at least 2 seeds and a finite gap")
    degrees = seeds - 1
    scale = math.sqrt(seeds) / sd
    t = t_quantile(1 - ALPHA, degrees)
    half = _SPREADS / math.sqrt(2 * degrees)
    low, high = max(0.0, 1 - half), min(1 + half, margin * scale / t)  # of sample sd / sd
    if high <= low:
        return 0.0
    nodes, weights = _rule()
    ratio = low + (high - low) * (nodes + 1) / 2
    room = margin * scale - t * ratio  # of the mean, in its own standard deviations
    passes = _normal(room - gap * scale) - _normal(-room - gap * scale)
    log_density = (
        math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
        + (degrees - 1) * np.log(ratio) - degrees / 2 * ratio**2
    )  # fmt: skip
    return float((weights * passes * np.exp(log_density)).sum() * (high - low) / 2)


def seeds_for(sd: float, margin: float, gap: float = 0.0, power: float = 0.8, most: int = 200) -> int | None:
    """Fewest seeds with which two one-sided tests at `ALPHA` pass with a probability of at least `power`.

    >>> seeds_for(sd=1.0, margin=1.0), seeds_for(sd=0.25, margin=1.0)
    (11, 3)

    Args:
        sd: of the paired gaps between seeds, in any unit.
        margin: of equivalence, in that unit.
        gap: the true one, in that unit.
        power: above 0 and below 1.
        most: seeds that are tried.

    Returns:
        At least `MIN_SEEDS`, below which nothing is judged; None where `most` are too few.

    Raises:
        ValueError: as `tost_power`, or a power outside of (0, 1).
    """
    if not 0 < power < 1:
        raise ValueError(f"power={power}: expected a number between 0 and 1")
    counts = range(MIN_SEEDS, most + 1)
    return next((n for n in counts if tost_power(sd, margin, n, gap) >= power), None)


@lru_cache(maxsize=1)
def _rule() -> tuple[Vector, Vector]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return np.asarray(nodes), np.asarray(weights)


def _normal(x: Vector) -> Vector:
    """Distribution function of the standard normal distribution."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
