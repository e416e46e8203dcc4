"""Statistics of repeated timings, without torch, so that a laptop can judge runs made elsewhere.

The unit is the round. Samples of one round share clock, temperature and neighbours; a rank test at 5 % that
counts them as independent alarms on 5 to 36 % of unchanged pairs, by kind of noise (reports/studies/gate_error_rates.py).
So samples are reduced to one median per round, two arms are paired by round, and intervals and tests run
on the logarithms of the paired ratios: Student's t for intervals and tests. A percentile
bootstrap over eight rounds covers 85 to 90 % where 95 % is claimed, so there is none here.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval; an interval of (0, inf) or (-inf, inf) says "unknown"."""

    value: float
    low: float
    high: float
    count: int


def median(values: ArrayLike) -> float:
    """Middle value; mean of the two middle ones for an even count. ValueError if empty or not finite."""
    return float(np.median(_vector(values)))


def t_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Student t interval of the mean of independent values.

    >>> low, high = t_interval([1.0, 2.0, 3.0])  # 2 -+ 4.3027 * 1 / sqrt(3)
    >>> round(low, 4), round(high, 4)
    (-0.4841, 4.4841)

    Returns:
        (low, high); (-inf, inf) for a single value, which says nothing about its spread.

    Raises:
        ValueError: no values, a value that is not finite, or a confidence outside of (0, 1).
    """
    x = _vector(values)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1")
    _, (low,), (high,) = t_intervals([x], confidence)
    return float(low), float(high)


def prediction_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Where one more value of the same normal distribution falls: mean -+ t sd sqrt(1 + 1/n).

    >>> low, high = prediction_interval([1.0, 2.0, 3.0])  # 2 -+ 4.3027 * 1 * sqrt(4/3)
    >>> round(low, 4), round(high, 4)
    (-2.9683, 6.9683)

    Returns:
        (low, high); (-inf, inf) for a single value.

    Raises:
        ValueError: as `t_interval`.
    """
    x = _vector(values)
    low, high = t_interval(x, confidence)
    centre, half = float(x.mean()), (high - low) / 2
    if math.isinf(half):
        return low, high
    half *= math.sqrt(x.size + 1)
    return centre - half, centre + half


def geometric_mean(ratios: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Geometric mean of positive ratios with the t interval of their logarithms.

    Raises:
        ValueError: no ratios, or one that is not finite and above 0.
    """
    x = _vector(ratios)
    if x.min() <= 0:
        raise ValueError(f"ratio {x.min()} has no logarithm; ratios must be above 0")
    logs = np.log(x)
    low, high = t_interval(logs, confidence)
    return Estimate(math.exp(logs.mean()), math.exp(low), math.exp(high), x.size)


def paired_log_ratios(
    baseline: ArrayLike, baseline_rounds: ArrayLike, candidate: ArrayLike, candidate_rounds: ArrayLike
) -> Vector:
    """log(median candidate / median baseline) of each round that both have, in the order of rounds.

    Positive: the candidate takes longer.

    >>> paired_log_ratios([1.0, 1.0, 2.0], [0, 0, 1], [2.0, 4.0], [0, 1]).round(4).tolist()
    [0.6931, 0.6931]

    Raises:
        ValueError: samples and rounds of an arm differ in length, a sample is not above 0, or the arms
            share no round (they were not measured together).
    """
    a, b = round_medians(baseline, baseline_rounds), round_medians(candidate, candidate_rounds)
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError(f"no common round: baseline has {sorted(a)}, candidate {sorted(b)}")
    return np.array([math.log(b[r] / a[r]) for r in shared])


@dataclass(frozen=True, slots=True)
class Welch:
    """The difference of two means, second minus first, of independent values whose spreads may differ (Welch's t).

    Attributes:
        difference: of the means.
        error: its standard error; 0 where neither side varies.
        degrees: of freedom.
    """

    difference: float
    error: float
    degrees: float

    @classmethod
    def of(cls, first: ArrayLike, second: ArrayLike) -> Welch:
        """From at least two values a side.

        >>> found = Welch.of([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])
        >>> found.difference, round(found.degrees, 6), [round(end, 3) for end in found.interval()]
        (2.0, 4.0, [-0.267, 4.267])
        """
        sides = [_vector(values) for values in (first, second)]
        errors = [float(x.var(ddof=1)) / x.size for x in sides]
        spread = sum(e**2 / (x.size - 1) for e, x in zip(errors, sides, strict=True))
        degrees = sum(errors) ** 2 / spread if spread else 1.0
        return cls(float(sides[1].mean() - sides[0].mean()), math.sqrt(sum(errors)), degrees)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Interval of the true difference."""
        half = t_quantile((1 + confidence) / 2, self.degrees) * self.error
        return self.difference - half, self.difference + half

    def p_within(self, margin: float) -> float:
        """The larger p of two one-sided tests of "the true difference lies within -+margin"."""
        from scipy.special import stdtr

        return float(stdtr(self.degrees, (abs(self.difference) - margin) / self.error))


def all_are_times(arms: Collection[ArrayLike]) -> NDArray[np.bool_]:
    """Whether all samples of each arm are finite and above 0, as `round_medians` needs them."""
    sizes = [np.size(samples) for samples in arms]
    x = np.concatenate([np.zeros(0), *(np.asarray(samples, np.float64) for samples in arms)])
    refused = np.repeat(np.arange(len(sizes)), sizes)[~(np.isfinite(x) & (x > 0))]
    return ~np.isin(np.arange(len(sizes)), refused)


def round_medians(samples: ArrayLike, rounds: ArrayLike) -> dict[int, float]:
    """Median of the samples of each round, by round, in their order.

    Raises:
        ValueError: samples and rounds differ in length, or a sample is not finite and above 0.
    """
    x, r = _vector(samples), np.asarray(rounds)
    if r.shape != x.shape:
        raise ValueError(f"{x.size} samples but {r.size} rounds")
    if x.min() <= 0:
        raise ValueError(f"sample {x.min()} has no logarithm; times must be above 0")
    (medians,) = all_round_medians([(x, r)])
    return medians


def all_round_medians(arms: Sequence[tuple[ArrayLike, ArrayLike]]) -> list[dict[int, float]]:
    """`round_medians` of many arms (samples, rounds) at once; empty for one that has a sample which is no time."""
    found: list[dict[int, float]] = [{} for _ in arms]
    if not arms:
        return found
    x = np.concatenate([np.asarray(samples, dtype=np.float64) for samples, _ in arms])
    r = np.concatenate([np.asarray(rounds) for _, rounds in arms])
    arm = np.repeat(np.arange(len(arms)), [np.size(samples) for samples, _ in arms])
    refused = np.unique(arm[~(np.isfinite(x) & (x > 0))])
    order = np.lexsort((x, r, arm))
    x, r, arm = x[order], r[order], arm[order]
    starts = np.flatnonzero(np.r_[True, (arm[1:] != arm[:-1]) | (r[1:] != r[:-1])])
    counts = np.diff(np.r_[starts, x.size])
    medians = (x[starts + (counts - 1) // 2] + x[starts + counts // 2]) / 2
    for i, number, median in zip(arm[starts].tolist(), r[starts].tolist(), medians.tolist(), strict=True):
        found[i][int(number)] = median
    for i in refused.tolist():
        found[i] = {}
    return found


def t_intervals(rows: ArrayLike, confidence: float = 0.95) -> tuple[Vector, Vector, Vector]:
    """Mean and t interval of each row of a matrix [units, rounds]; unbounded where there is one round only."""
    x = np.asarray(rows, dtype=np.float64)
    mean = x.mean(axis=1)
    n = x.shape[1]
    if n == 1:
        return mean, np.full_like(mean, -np.inf), np.full_like(mean, np.inf)
    half = t_quantile((1 + confidence) / 2, n - 1) * x.std(axis=1, ddof=1) / math.sqrt(n)
    return mean, mean - half, mean + half


def holm(p_values: ArrayLike) -> Vector:
    """Holm's step-down adjustment: compared with alpha, it bounds the chance of any false rejection by alpha.

    S. Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.

    >>> holm([0.01, 0.04, 0.03]).round(4).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = p[order] * np.arange(p.size, 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


@lru_cache(maxsize=1024)
def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t distribution.

    >>> round(t_quantile(0.975, 7), 6)
    2.364624

    Raises:
        ValueError: probability outside of (0, 1) or fewer than one degree of freedom.
    """
    from scipy.special import (
        stdtrit,
    )  # a tenth of a second, which a command that judges nothing need not wait for

    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"t_quantile({probability}, {degrees}): needs 0 < probability < 1 and degrees >= 1")
    return float(stdtrit(degrees, probability))


def _vector(values: ArrayLike) -> Vector:
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if x.size == 0:
        raise ValueError("no values")
    if not np.isfinite(x).all():
        raise ValueError(f"values must be finite, found {x[~np.isfinite(x)][0]}")
    return x


# Effect: how much longer one set of times is than another, how sure that is, and in which direction it is known to be.
#
# Everything that answers "did it get slower?" starts from here: the report (an arm against its baseline), `diff` (a run against
# another) and the gate (a candidate against a baseline). Each then adds a policy of its own, and says so.

MIN_ROUNDS = 3  # a t interval over two rounds has one degree of freedom: too wide to decide anything
Direction = Literal["slower", "faster", "same", "unclear"]


@dataclass(frozen=True, slots=True)
class Effect:
    """The second times over the first.

    Attributes:
        log: mean over rounds of log(second / first); positive = the second takes longer; NaN without a round.
        log_low, log_high: 95 % interval of it (99 % and more where the gate looked again); infinite where there is none.
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
    def as_floor(self) -> float:
        """The noise floor that two equal things show: the far end of the interval, as a ratio >= 1; NaN where there is none."""
        return math.exp(max(abs(self.log_low), abs(self.log_high))) if self.has_interval else math.nan

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


def all_paired(
    rows: Sequence[Sequence[float] | Vector], floors: Sequence[float] = (), confidence: float = 0.95
) -> list[Effect]:
    """`paired` of many units at once, those with as many rounds together."""
    floors = floors or [math.nan] * len(rows)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, logs in enumerate(rows):
        by_length[len(logs)].append(i)
    found: dict[int, Effect] = {}
    for length, indices in by_length.items():
        if not length:
            found |= {i: Effect(math.nan, -math.inf, math.inf, 0, floors[i]) for i in indices}
            continue
        _, lows, highs = t_intervals(np.stack([np.asarray(rows[i]) for i in indices]), confidence)
        for i, low, high in zip(indices, lows, highs, strict=True):
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
    welch = Welch.of(*logs)
    half = t_quantile(0.975, max(1, math.floor(welch.degrees))) * welch.error
    return Effect(middle, middle - half, middle + half, rounds, floor)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf
