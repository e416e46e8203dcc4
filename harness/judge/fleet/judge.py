"""What a fleet's rows say: how far cards of one model lie apart, which of them is out of line, which computes wrongly.

**Rule of times.** Compared are cards that are alike, on each measurement that at least three of them have. A card's
deviation there is the logarithm of its time over the median of the cards; its score in a suite and regime is the median
of its deviations there, and how far a score may lie from the middle one says `harness.judge.fleet.limit`. A median over
measurements keeps one noisy case from condemning a card; a score by suite shows a fault of the memory (copies) beside
one of the cores (products), and one by regime a card that throttles under sustained load alone.

**Rule of results.** The suite `checksum` multiplies fixed operands. A card whose product was not the exact one, or not
the one that it gave a moment before, computes wrongly whatever the others do. Alike cards must give the same bits;
whichever gave bits that most of the others did not is wrong, be it once, and where no value has a majority all are suspect.

**Rule of failures.** A card on which something fails is out of line if it runs on at least half of those that tried.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.fleet.cards import CHECKSUM, Card, Key, differences
from harness.judge.fleet.limit import limits

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

ENOUGH = 3  # cards, below which the odd one can't be told from the others
CLOCK_SHARE = 0.97  # of the others' clock, below which the clock is taken for the cause


@dataclass(frozen=True, slots=True)
class Outlier:
    """A card that is out of line, in one suite and regime or by its results (regime "")."""

    card: str
    model: str
    suite: str
    regime: str
    kind: str  # slow, fast, corrupt, fails
    off: float  # its time over the middle one, minus 1; 0 where no time is meant
    reason: str


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the cards lie apart in one arm of a suite, in one regime.

    Attributes:
        cards, cases: that were compared.
        low, high: fastest and slowest card's time over the middle one, minus 1, at the median of the cases.
        slowest: name of the slowest.
        speedup: over the arm's baseline, geometric mean over the cases: of the middle card; None for a baseline.
        slowest_speedup: of the card where it is smallest: what may be claimed of every card of this fleet.
    """

    suite: str
    regime: str
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
    """Alike cards and what is found among them.

    Attributes:
        checked: results that at least two cards have a checksum of.
        timed: names of the cards that were judged by their times, of every arm, suite and regime that others were judged by.
        lacking: of the cards that were judged by some of them alone, the others, as "suite arm regime".
        compared: names of the cards that were judged by their results.
    """

    model: str
    cards: tuple[Card, ...]
    spreads: tuple[Spread, ...] = ()
    outliers: tuple[Outlier, ...] = ()
    differences: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    checked: int = 0
    timed: frozenset[str] = frozenset()
    compared: frozenset[str] = frozenset()
    lacking: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        """Why no card can be judged by its times; empty where some can."""
        if len(self.cards) < ENOUGH:
            return f"{len(self.cards)} of this model, software and code: an outlier takes {ENOUGH} to tell"
        return "" if self.spreads else f"no measurement that {ENOUGH} of the cards have in common"


def judge(alike: Sequence[Card], tolerance: float) -> Group:
    """What is found among alike cards.

    Args:
        alike: at least one card.
        tolerance: deviation that is no fault, 0.05 for 5 %.
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
    checked = [
        key
        for key in sorted(set().union(*(c.checksums for c in alike)))
        if sum(key in c.checksums for c in alike) > 1
    ]
    judged = {_arm(key) for key in shared}
    lacking = {
        name: tuple(sorted(" ".join(filter(None, arm)) for arm in missing))
        for name, own in off.items()
        if own and (missing := judged - {_arm(key) for key in own})
    }
    return Group(
        alike[0].model,
        tuple(alike),
        tuple(_spreads(alike, shared, off)),
        (*_corrupt(alike), *_failing(alike), *_out_of_line(alike, off, tolerance)),
        differences(alike),
        len(checked),
        timed=frozenset(name for name, own in off.items() if own and name not in lacking),
        compared=frozenset(c.name for c in alike if c.wrong or any(key in c.checksums for key in checked)),
        lacking=lacking,
    )


def _middle(alike: Sequence[Card], key: Key) -> float:
    return math.exp(statistics.median(math.log(c.times[key]) for c in alike if key in c.times))


def _out_of_line(alike: Sequence[Card], off: dict[str, dict[Key, float]], tolerance: float) -> list[Outlier]:
    found = []
    places = sorted({_place(key) for own in off.values() for key in own})
    for place in places:
        suite, regime = place
        scores = {
            name: statistics.median(deviations)
            for name, own in off.items()
            if (deviations := [d for key, d in own.items() if _place(key) == place])
        }
        (middle,), (limit,) = limits(np.array([list(scores.values())]), tolerance, len(places))
        for card in alike:
            score = scores.get(card.name, middle) - middle
            if abs(score) > limit:
                share = float(math.expm1(score))
                notes = (
                    f"{abs(share):.1%} {'above' if share > 0 else 'below'} the middle of {len(scores)} cards"
                )
                why = f"{notes}, limit {math.expm1(limit):.1%}; {_cause(card, alike, place)}"
                kind = "slow" if share > 0 else "fast"
                found.append(Outlier(card.name, card.model, suite, regime, kind, share, why))
    return found


def _place(key: Key) -> tuple[str, str]:
    """Suite and regime, of which each card has a score."""
    suite, _, _, _, regime = key
    return suite, regime


def _arm(key: Key) -> tuple[str, str, str]:
    """Suite, arm and regime, which a card has to have measured to be judged by."""
    suite, _, arm, _, regime = key
    return suite, arm, regime


def _cause(card: Card, alike: Sequence[Card], place: tuple[str, str]) -> str:
    """What else is different about a card that is out of line."""
    notes = []
    mine = [key for key in card.times if _place(key) == place]
    throttled = sum(key in card.throttled for key in mine)
    if throttled:
        notes.append(f"throttled in {throttled} of {len(mine)} measurements")
    shares = [
        card.clock_mhz[key] / statistics.median(clocks)
        for key in mine
        if key in card.clock_mhz
        and (clocks := [c.clock_mhz[key] for c in alike if c is not card and key in c.clock_mhz])
    ]
    if shares and statistics.median(shares) < CLOCK_SHARE:
        notes.append(f"SM clock {statistics.median(shares):.0%} of the others'")
    for name in ("power_limit_w", "driver"):
        own, others = card.env.get(name), Counter(str(c.env.get(name)) for c in alike if c is not card)
        usual = others.most_common(1)[0][0]
        if str(own) != usual:
            notes.append(f"{name} {own}, most others {usual}")
    if notes:
        return ", ".join(notes)
    if not shares:
        return "no clock was read, so the cause is unknown"
    return "at the others' clock and power limit: memory, cooling of the memory, or a fault"


def _spreads(alike: Sequence[Card], shared: set[Key], off: dict[str, dict[Key, float]]) -> list[Spread]:
    found = []
    for place, arm in sorted({(_place(key), key[2]) for key in shared}):
        keys = [key for key in shared if (_place(key), key[2]) == (place, arm)]
        own = {
            name: statistics.median(deviations)
            for name, by_key in off.items()
            if (deviations := [by_key[key] for key in keys if key in by_key])
        }
        slowest = max(own, key=lambda name: (own[name], name))
        speedups = [s for card in alike if (s := _speedup(card, keys)) is not None]
        found.append(
            Spread(
                *place,
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


def _corrupt(alike: Sequence[Card]) -> list[Outlier]:
    """Cards whose results are wrong: refuted by the card's own check, or of other bits than most cards'."""
    found: dict[str, str] = {}
    for card in alike:
        for (case, arm), reason in card.wrong.items():
            found.setdefault(card.name, f"product {arm} of case {case}: {reason}")
    for case, arm in sorted(set().union(*(card.checksums for card in alike))):
        given = {card.name: values for card in alike if (values := card.checksums.get((case, arm)))}
        right, votes = _majority(given.values())
        for name, values in given.items():
            if values != right:
                gave = " and ".join(sorted(values))
                found.setdefault(
                    name,
                    f"product {arm} of case {case} has checksum {gave}, {votes}: a card computes wrongly",
                )
    return [
        Outlier(card.name, card.model, CHECKSUM, "", "corrupt", 0.0, found[card.name])
        for card in alike
        if card.name in found
    ]


def _majority(given: Collection[set[str]]) -> tuple[set[str], str]:
    """The right value, or none where it is unknown, and how many cards gave it.

    Args:
        given: the values of each card; more than one where a card contradicts itself.
    """
    (first, votes), *others = Counter(value for values in given for value in values).most_common()
    if 2 * votes > len(given) and all(count < votes for _, count in others):
        return {first}, f"{votes} of {len(given)} cards give {first}"
    return set(), "no value has a majority"


def _failing(alike: Sequence[Card]) -> list[Outlier]:
    """Cards on which something fails that runs on at least half of the cards that tried."""
    ran = Counter(key for card in alike for key in card.runs)
    failed = Counter(key for card in alike for key in card.failed)
    found = []
    for card in alike:
        alone = [(key, reason) for key, reason in sorted(card.failed.items()) if ran[key] >= failed[key]]
        if alone:
            (suite, case, arm), reason = alone[0]
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            why = f"{arm} of case {case}{more}: {reason}"
            found.append(Outlier(card.name, card.model, suite, "", "fails", 0.0, why))
    return found
