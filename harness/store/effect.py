"""Effect: how much longer one set of times is than another, how sure that is, and in which direction it is known to be.

Everything that answers "did it get slower?" starts from here: the report (an arm against its baseline), `diff` (a run
against another) and the gate (a candidate against a baseline). Each then adds a policy of its own, and says so.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.store import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store.stats import Vector

MIN_ROUNDS = 3  # a t interval over two rounds has one degree of freedom: too wide to decide anything
Direction = Literal["slower", "faster", "same", "unclear"]


@dataclass(frozen=True, slots=True)
class Effect:
    """The second times over the first.

    Attributes:
        log: mean over rounds of log(second / first); positive = the second takes longer; NaN without a round.
        log_low, log_high: 95 % interval of it; infinite where there is none.
        rounds: on which it rests: pairs where the sides were timed in the same rounds, else the fewer of both sides'.
        floor: noise floor, a ratio >= 1: two equal things seem up to so far apart here; NaN where it is not known.
    """

    log: float
    log_low: float
    log_high: float
    rounds: int
    floor: float = math.nan

    @property
    def ratio(self) -> float:
        """Second over first: above 1 the second takes longer."""
        return math.exp(self.log)

    @property
    def low(self) -> float:
        """Lower end of the interval of `ratio`."""
        return math.exp(self.log_low)

    @property
    def high(self) -> float:
        """Upper end of the interval of `ratio`."""
        return _exp(self.log_high)

    @property
    def speedup(self) -> float:
        """First over second: above 1 the second is faster."""
        return math.exp(-self.log)

    @property
    def size(self) -> float:
        """How far apart the sides are, as a ratio >= 1, in either direction."""
        return math.exp(abs(self.log))

    @property
    def has_interval(self) -> bool:
        """Whether there are rounds enough for an interval that decides anything."""
        return self.rounds >= MIN_ROUNDS

    @property
    def direction(self) -> Direction:
        """The direction that the rounds show, before any policy.

        `same`: no further apart than two equal things here. `unclear`: too few rounds, or the interval holds 1.
        """
        if not self.has_interval or math.isnan(self.log):
            return "unclear"
        if self.size <= self.floor:
            return "same"
        if self.log_low <= 0 <= self.log_high:
            return "unclear"
        return "slower" if self.log > 0 else "faster"

    def __str__(self) -> str:
        """The change in percent with its interval: "+5.0 % (+4.8 % to +5.2 %)"."""
        if not self.has_interval:
            return f"{self.ratio - 1:+.1%}"
        return f"{self.ratio - 1:+.1%} ({self.low - 1:+.1%} to {self.high - 1:+.1%})"


def paired(logs: Sequence[float] | Vector, floor: float = math.nan) -> Effect:
    """The effect where both sides were timed in the same rounds: Student's t over the rounds.

    Args:
        logs: log(second / first) of each round.
        floor: the noise floor as a ratio.
    """
    (effect,) = all_paired([logs], [floor])
    return effect


def all_paired(rows: Sequence[Sequence[float] | Vector], floors: Sequence[float] = ()) -> list[Effect]:
    """`paired` of many units at once, those with as many rounds together."""
    floors = floors or [math.nan] * len(rows)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, logs in enumerate(rows):
        by_length[len(logs)].append(i)
    found: dict[int, Effect] = {}
    for length, places in by_length.items():
        if not length:
            found |= {i: Effect(math.nan, -math.inf, math.inf, 0, floors[i]) for i in places}
            continue
        _, lows, highs = stats.t_intervals(np.stack([np.asarray(rows[i]) for i in places]))
        for i, low, high in zip(places, lows, highs, strict=True):
            mean = float(sum(rows[i])) / length  # added in the order of the rounds
            found[i] = Effect(mean, float(low), float(high), length, floors[i])
    return [found[i] for i in range(len(rows))]


def unpaired(first: Sequence[float], second: Sequence[float], floor: float = math.nan) -> Effect:
    """The effect where the sides were timed apart: Welch's t on the logarithms of the medians of their rounds.

    A drift between the two is not cancelled; a floor must stand for it.

    >>> effect = unpaired([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    >>> effect.ratio, effect.low, effect.high, effect.direction
    (2.0, 2.0, 2.0, 'slower')

    Args:
        first: median time of each round; all above 0.
        second: of the other side, in the same unit.
        floor: the noise floor as a ratio.
    """
    logs = [[math.log(x) for x in side] for side in (first, second)]
    middle = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    rounds = min(map(len, logs))
    if rounds < 2:
        return Effect(middle, -math.inf, math.inf, rounds, floor)
    welch = stats.Welch.of(*logs)
    half = stats.t_quantile(0.975, max(1, math.floor(welch.degrees))) * welch.error
    return Effect(middle, middle - half, middle + half, rounds, floor)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf
