"""What a fleet's rows say: how far cards of one model lie apart, which of them is out of line, which computes wrongly.

**Rule of times.** Compared are cards that are alike, on each measurement that at least three of them have. A card's
deviation there is the logarithm of its time over the median of the cards; its score in a suite is the median of its
deviations. A card is out of line if its score lies further from the middle score than the tolerance (5 %) *and* than 3.5
robust standard deviations (1.4826 times the median absolute deviation of the scores; Iglewicz and Hoaglin, How to
Detect and Handle Outliers, ASQC 1993). A median over measurements keeps one noisy case from condemning a card; a score by suite
shows a fault of the memory (casts) beside one of the cores (products). Healthy cards of one node lie some 5 % apart
(docs/fleet.md), which is what the tolerance is for.

**Rule of results.** The suite `checksum` multiplies fixed operands. Alike cards must give the same bits; whichever
differs from most of the others is wrong, and where no value has a majority all of them are suspect.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.fleet.cards import Card, Key, differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ENOUGH = 3  # cards, below which the odd one can't be told from the others
SIGMAS = 3.5
MAD_TO_SD = 1.4826  # of a normal distribution: 1 / quantile(0.75)
CLOCK_SHARE = 0.97  # of the others' clock, below which the clock is taken for the cause


@dataclass(frozen=True, slots=True)
class Outlier:
    """A card that is out of line, in one suite or by its results."""

    card: str
    model: str
    suite: str
    kind: str  # slow, fast, corrupt, fails
    off: float  # its time over the middle one, minus 1; 0 where no time is meant
    reason: str


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the cards lie apart in one arm of a suite.

    Attributes:
        cards, cases: that were compared.
        low, high: fastest and slowest card's time over the middle one, minus 1, at the median of the cases.
        slowest: name of the slowest.
        speedup: over the arm's baseline, geometric mean over the cases: of the middle card; None for a baseline.
        slowest_speedup: of the card where it is smallest: what may be claimed of every card of this fleet.
    """

    suite: str
    arm: str
    cards: int
    cases: int
    low: float
    high: float
    slowest: str
    speedup: float | None
    slowest_speedup: float | None


@dataclass(frozen=True)
class Group:
    """Alike cards and what is found among them."""

    model: str
    cards: tuple[Card, ...]
    spreads: tuple[Spread, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    differences: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    checked: int = 0  # results that at least two cards have a checksum of

    @property
    def why_not(self) -> str:
        """Why no card can be judged by its times; empty where some can."""
        if len(self.cards) < ENOUGH:
            return f"{len(self.cards)} of this model, software and commit: an outlier takes {ENOUGH} to tell"
        return "" if self.spreads else f"no measurement that {ENOUGH} of the cards have in common"


def judge(alike: Sequence[Card], tolerance: float) -> Group:
    """What is found among alike cards.

    Args:
        alike: at least one card.
        tolerance: deviation that is nobody's fault, 0.05 for 5 %.
    """
    shared = {
        key for key in set().union(*(c.times for c in alike)) if sum(key in c.times for c in alike) >= ENOUGH
    }
    off = {
        card.name: {
            key: math.log(card.times[key] / _middle(alike, key)) for key in shared if key in card.times
        }
        for card in alike
    }
    corrupt, checked = _corrupt(alike)
    return Group(
        alike[0].model,
        tuple(alike),
        tuple(_spreads(alike, shared, off)),
        (*corrupt, *_failing(alike), *_out_of_line(alike, off, tolerance)),
        differences(alike),
        checked,
    )


def _middle(alike: Sequence[Card], key: Key) -> float:
    return math.exp(statistics.median(math.log(c.times[key]) for c in alike if key in c.times))


def limits(scores: NDArray[np.float64], tolerance: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The middle score of each fleet and how far a card's may be from it.

    Args:
        scores: [fleets, cards], logarithms.
        tolerance: deviation that is nobody's fault, 0.05 for 5 %.
    """
    middle = np.median(scores, axis=1)
    sd = MAD_TO_SD * np.median(np.abs(scores - middle[:, None]), axis=1)
    return middle, np.maximum(math.log1p(tolerance), SIGMAS * sd)


def _out_of_line(alike: Sequence[Card], off: dict[str, dict[Key, float]], tolerance: float) -> list[Outlier]:
    found = []
    for suite in sorted({key[0] for own in off.values() for key in own}):
        scores = {
            card.name: statistics.median(own)
            for card in alike
            if (own := [d for key, d in off[card.name].items() if key[0] == suite])
        }
        if len(scores) < ENOUGH:
            continue
        (middle,), (limit,) = limits(np.array([list(scores.values())]), tolerance)
        for card in alike:
            score = scores.get(card.name, middle) - middle
            if abs(score) > limit:
                share = float(math.expm1(score))
                said = f"{abs(share):.1%} {'above' if share > 0 else 'below'} the middle of {len(scores)} cards, limit {math.expm1(limit):.1%}"
                kind = "slow" if share > 0 else "fast"
                found.append(
                    Outlier(
                        card.name, card.model, suite, kind, share, f"{said}; {_cause(card, alike, suite)}"
                    )
                )
    return found


def _cause(card: Card, alike: Sequence[Card], suite: str) -> str:
    """What else is different about a card that is out of line."""
    said = []
    mine = [key for key in card.times if key[0] == suite]
    throttled = sum(key in card.throttled for key in mine)
    if throttled:
        said.append(f"throttled in {throttled} of {len(mine)} measurements")
    shares = [
        card.clock_mhz[key] / statistics.median(clocks)
        for key in mine
        if key in card.clock_mhz
        and (clocks := [c.clock_mhz[key] for c in alike if c is not card and key in c.clock_mhz])
    ]
    if shares and statistics.median(shares) < CLOCK_SHARE:
        said.append(f"SM clock {statistics.median(shares):.0%} of the others'")
    for name in ("power_limit_w", "driver"):
        own, others = card.env.get(name), Counter(str(c.env.get(name)) for c in alike if c is not card)
        usual = others.most_common(1)[0][0]
        if str(own) != usual:
            said.append(f"{name} {own}, most others {usual}")
    if said:
        return ", ".join(said)
    if not shares:
        return "no clock was read, so the cause can't be told"
    return "at the others' clock and power limit: memory, cooling of the memory, or a fault"


def _spreads(alike: Sequence[Card], shared: set[Key], off: dict[str, dict[Key, float]]) -> list[Spread]:
    found = []
    for suite, arm in sorted({(key[0], key[2]) for key in shared}):
        keys = [key for key in shared if (key[0], key[2]) == (suite, arm)]
        own = {
            name: statistics.median(deviations)
            for name, by_key in off.items()
            if (deviations := [by_key[key] for key in keys if key in by_key])
        }
        slowest = max(own, key=lambda name: (own[name], name))
        speedups = [s for card in alike if (s := _speedup(card, keys)) is not None]
        found.append(
            Spread(
                suite,
                arm,
                len(own),
                len(keys),
                math.expm1(min(own.values())),
                math.expm1(own[slowest]),
                slowest,
                statistics.median(speedups) if speedups else None,
                min(speedups, default=None),
            )
        )
    return found


def _speedup(card: Card, keys: Sequence[Key]) -> float | None:
    """Geometric mean over those cases that this card measured in both arms, in the same rounds."""
    logs = []
    for suite, case, arm, metric, regime in keys:
        key = (suite, case, arm, metric, regime)
        base = (suite, case, card.baselines.get(key, ""), metric, regime)
        if key in card.times and base in card.times:
            logs.append(math.log(card.times[base] / card.times[key]))
    return math.exp(statistics.fmean(logs)) if logs else None


def _corrupt(alike: Sequence[Card]) -> tuple[list[Outlier], int]:
    """Cards whose results have other bits than most of the others', and how many results could be compared."""
    found: dict[str, Outlier] = {}
    keys = sorted(set().union(*(card.checksums for card in alike)))
    checked = [key for key in keys if sum(key in card.checksums for card in alike) > 1]
    for case, arm in checked:
        values = {card.name: card.checksums[case, arm] for card in alike if (case, arm) in card.checksums}
        (first, votes), *others = Counter(values.values()).most_common()
        if not others:
            continue
        right = first if votes > len(values) / 2 else None
        for card in alike:
            value = values.get(card.name, right)
            if value != right and card.name not in found:
                said = f"{votes} of {len(values)} cards give {first}" if right else "no value has a majority"
                reason = f"product {arm} of case {case} has checksum {value}, {said}: a card computes wrongly"
                found[card.name] = Outlier(card.name, card.model, "checksum", "corrupt", 0.0, reason)
    return list(found.values()), len(checked)


def _failing(alike: Sequence[Card]) -> list[Outlier]:
    """Cards on which something fails that runs on most of the others."""
    found = []
    for card in alike:
        alone = [
            (key, reason)
            for key, reason in sorted(card.failed.items())
            if sum(key in other.times for other in alike) >= max(2, len(alike) / 2)
        ]
        if alone:
            (suite, case, arm, *_), reason = alone[0]
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            found.append(
                Outlier(card.name, card.model, suite, "fails", 0.0, f"{arm} of case {case}{more}: {reason}")
            )
    return found
