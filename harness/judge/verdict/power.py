"""Power: how many seeds the equivalence test of the loss verdict (gate L4) needs."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from harness.judge.verdict.result import ALPHA, MIN_SEEDS
from harness.store.stats import Vector, t_quantile

NODES = 160  # of the Gauss-Legendre rule over the distribution of the sd


def seeds_for(sd: float, margin: float, gap: float = 0.0, power: float = 0.8, most: int = 200) -> int | None:
    """Smallest number of seeds at which the two one-sided tests of one half of L4 pass with some probability.

    Args:
        sd: standard deviation between seeds of the paired gap, in the unit of the margin.
        margin: of equivalence, above 0.
        gap: the true gap.
        power: the probability to reach.
        most: the largest number to consider.

    Returns:
        At least `MIN_SEEDS`; None where `most` seeds are too few.

    Raises:
        ValueError: sd below 0, a margin that is not above 0, or a power outside of (0, 1).

    >>> seeds_for(0.5, 1.0), seeds_for(1.0, 1.0, gap=1.0)
    (4, None)
    """
    if not 0 < power < 1:
        raise ValueError(f"power={power} must lie between 0 and 1")
    return next(
        (n for n in range(MIN_SEEDS, most + 1) if pass_probability(n, sd, margin, gap) >= power), None
    )


def pass_probability(seeds: int, sd: float, margin: float, gap: float = 0.0) -> float:
    """Probability that the 90 % t interval of normal gaps of so many seeds lies inside the margin.

    Exact: given s, the sd of a sample in units of the true one, the mean must lie within margin - t s sd / sqrt(n), and
    (n - 1) s^2 has a chi-squared distribution, over which the probability is integrated.

    Raises:
        ValueError: fewer than 2 seeds, sd below 0 or a margin that is not above 0.
    """
    if seeds < 2 or sd < 0 or not margin > 0:
        raise ValueError(
            f"seeds={seeds}, sd={sd}, margin={margin}: needs 2 seeds, sd >= 0 and a margin above 0"
        )
    if sd == 0:
        return float(abs(gap) < margin)
    error = sd / math.sqrt(seeds)  # standard error of the mean
    times = t_quantile(1 - ALPHA, seeds - 1)
    degrees = seeds - 1
    # Beyond the first limit no mean passes; beyond the second the density of s is below 1e-20.
    top = min(margin / (times * error), 1 + 10 / math.sqrt(degrees))
    nodes, weights = _gauss_legendre()
    s = (nodes + 1) * top / 2
    log_density = (
        math.log(2)
        + degrees / 2 * math.log(degrees / 2)
        - math.lgamma(degrees / 2)
        + (degrees - 1) * np.log(s)
        - degrees * s * s / 2
    )
    room = margin / error - times * s
    inside = _normal(room - gap / error) - _normal(-room - gap / error)
    return float(top / 2 * (weights * np.exp(log_density) * inside).sum())


def _normal(z: Vector) -> Vector:
    """Distribution function of the standard normal."""
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])


@lru_cache(maxsize=1)
def _gauss_legendre() -> tuple[Vector, Vector]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return nodes, weights
