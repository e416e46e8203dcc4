"""The rule of links: which ends and which links are out of line among the links of one kind, at one size.

`harness.judge.fleet.links` says what it is applied to, and what it is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.fleet.limit import limits, widening

if TYPE_CHECKING:
    from collections.abc import Mapping

ENOUGH = 3  # links, ends, or pairs of hosts, below which the odd one can't be told from the others
TOLERANCE = 0.25  # by which healthy links may differ; docs/fleet-links.md says what was seen

Place = tuple[str, ...]  # of an end: `End.place`
Pair = tuple[Place, Place]  # of a link, the smaller first


@dataclass(frozen=True, slots=True)
class Score:
    """Logarithms of the seconds of a link: of the median round, the fastest and the slowest."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Found:
    """What the rule finds among links of a kind, at one size.

    Attributes:
        ends: out of line -> how far their fastest links are from the middle, and the limit.
        links: likewise slow, of those that are not of such ends.
        fast: links that are as far on the other side, which says that the others may be slow.
        rest: the links that were judged apart from those of such ends.
        limit: of a link; infinite where `rest` is empty.
    """

    ends: Mapping[Place, tuple[float, float]]
    links: Mapping[Pair, tuple[float, float]]
    fast: frozenset[Pair]
    rest: frozenset[Pair]
    limit: float


def out_of_line(scores: Mapping[Pair, Score], tolerance: float, of: int) -> Found:
    """The rule, on links' scores.

    Args:
        scores: of each link, at least `ENOUGH` of them.
        tolerance: deviation that is no fault.
        of: scores that links and ends are judged by.
    """
    fastest: dict[Place, list[Score]] = {}
    for pair, score in scores.items():
        for place in pair:
            fastest.setdefault(place, []).append(score)
    # One link alone says nothing of which of its ends is slow
    ends = {place: min(own, key=lambda one: one.middle) for place, own in fastest.items() if len(own) > 1}
    far_ends, _ = _far(ends, tolerance, of)
    bad = {place: far for place, far in far_ends.items() if far[0] > 0}
    rest = {pair: score for pair, score in scores.items() if not bad.keys() & set(pair)}
    far, limit = _far(rest, tolerance, of)
    slow = {pair: how for pair, how in far.items() if how[0] > 0}
    return Found(
        bad, slow, frozenset(far.keys() - slow), frozenset(rest if len(rest) >= ENOUGH else ()), limit
    )


def _far(
    scores: Mapping[Any, Score], tolerance: float, of: int
) -> tuple[dict[Any, tuple[float, float]], float]:
    if len(scores) < ENOUGH:
        return {}, math.inf
    (middle,), (limit,) = limits(np.array([[one.middle for one in scores.values()]]), tolerance, of)
    far = {
        name: (float(one.middle - middle), float(limit))
        for name, one in scores.items()
        if one.low - middle > limit or middle - one.high > limit
    }
    return far, float(limit)


def direction_limit(links: int, tolerance: float, of: int) -> float:
    """How far, as a logarithm, one direction of a link may be from the other: two scores differ by more than one does."""
    return math.sqrt(2) * widening(max(ENOUGH, links), of) * math.log1p(tolerance)
