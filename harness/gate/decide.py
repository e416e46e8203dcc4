"""Decide: from rounds to a verdict. Arrays in, verdicts out; the judge and the study of error rates both call this and nothing else.

A positive log ratio is worse. `limit` is log(1 + tolerance). With r the rounds of the first stage and s those of the
confirmation, for the direction d in which r leans:

    flagged     one-sided t test of d * r - limit over at least 5 rounds gives p <= alpha
    confirmed   the same test of d * s - limit on at least 8 fresh rounds, Holm over all that was flagged, p <= alpha_confirm
    REGRESSED   confirmed with d > 0;  IMPROVED   confirmed with d < 0
    OK          neither, and the upper end of the 95 % t interval over all rounds lies below the limit (99 % and more of later looks)
    INCONCLUSIVE   anything else; what looks slower (`suspect`) the judge never lets pass

The test is against the limit and not against zero, so a slowdown of exactly the tolerance is a false alarm, and its
rate is what alpha bounds. What is open is looked at again: the rounds so far say how many more settle it. Each look's interval
is wider than the last one's (`misses_of`), so that all together miss no more than 7 times of 100 (Bonferroni), and it has at
least as many rounds again: those make it narrower on average, and depend little on what the first ones were. Where nothing was measured again, the first stage has to pass alpha_confirm itself, over 8
rounds and with Holm over every unit: it then stands alone.

An exact sign-flip test cannot give less than 2**-rounds, so that Holm over many units can never be passed in few rounds,
however quiet the machine. A t test can, and pays with assumptions; three guards stand in for them:

    spread      no unit is quieter than `spread_floor`, which the units and the control of the run set together
    sign        two thirds of the rounds lie beyond the limit, and so the median does
    scatter     runs that were not measured together: a process differs from the next by more than its own rounds show;
                how far the units scatter around their median says by how much (`scatter_of`), and of too few units the
                most that is believed; it widens the interval by which a unit is OK as well
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from harness.store import stats
from harness.store.stats import MIN_ROUNDS, Effect, all_paired

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store.stats import Vector

FEWEST_TO_FLAG, FEWEST_TO_CLAIM = 5, 8  # rounds
WIDE = 3  # times its rounds, by which a look makes a first stage longer at most: few rounds know little of the spread
# Standard deviation of a round's log ratio that no machine undercuts: eight lucky rounds are no evidence of less.
LEAST_SPREAD = 0.002
TENTH = 0.1
SCATTER_DEGREES = 5  # of freedom: processes have heavier tails than a normal distribution
_NAN = math.nan
MOST_ROUNDS = 1000  # no one measures more: then the answer is that the change sits at the tolerance


class UnitVerdict(StrEnum):
    """Verdict of the gate on one unit."""

    REGRESSED = "REGRESSED"
    OK = "OK"
    IMPROVED = "IMPROVED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class UnitDecision:
    """The verdict on one unit and the figures behind it, in logarithms; positive is worse.

    `low` and `high` are the interval that decides: that of the effect, and wider where processes differ.
    """

    verdict: UnitVerdict
    effect: Effect
    low: float
    high: float
    p: float  # of the first stage, in the direction in which it leans; 1 where it is within the limit
    p_confirm: float  # Holm-adjusted; NaN where nothing was measured again
    flagged: bool
    fresh: int = 0  # rounds of the confirmation, which the effect's rounds hold too
    more: int | None = None  # rounds that would settle an INCONCLUSIVE one; None: no reasonable number
    apart: bool = False  # why there is none: the sides are one process each, which no rounds change
    suspect: bool = False  # whatever the verdict: flagged as slower, or its interval lies beyond the limit


NOTHING = UnitDecision(  # of what has no rounds
    UnitVerdict.INCONCLUSIVE, Effect(_NAN, _NAN, _NAN, 0), _NAN, _NAN, _NAN, _NAN, flagged=False
)


def decide(
    first: Sequence[Vector],
    second: Sequence[Vector],
    limits: Sequence[float],
    alpha: float = 0.05,
    alpha_confirm: float = 0.01,
    *,
    one_run: bool = True,
    floors: Sequence[float] = (),
    control: Vector | None = None,
    scatter: float = 0.0,
    fresh: bool = False,
    ticks: Sequence[float] = (),
    looks: int = 1,
) -> list[UnitDecision]:
    """The verdict on each unit.

    Args:
        first: log ratios of the first stage by unit; all finite; may be empty.
        second: those of the confirmation; empty where a unit was not measured again.
        limits: log(1 + tolerance) of each unit.
        alpha: of the first stage.
        alpha_confirm: of the confirmation.
        floors: noise floor of each unit as a ratio, NaN where it is not known; it decides nothing here.
        one_run: the units are those of one run, so Holm runs over them; False: each is a run of its own.
        control: log ratios of the control case by round.
        scatter: most that two processes of the same code are believed to differ by (standard deviation of a log ratio);
            0 where the sides were measured together.
        fresh: each round has processes of its own, so that the rounds of few units show what processes differ by.
        ticks: of each unit, by how much the step of the clock may move its log ratio: a part of every bar.
        looks: at the first stage: one more each time that what its rounds gave made it longer.
    """
    misses = misses_of(looks)
    steps = ticks or [0.0] * len(first)
    members = first if one_run else []
    quiet = spread_floor(members, control)
    known = scatter_of(members)
    apart = min(scatter, known) if known is not None else 0.0 if fresh else scatter
    leans = [-1.0 if len(r) and r.mean() < 0 else 1.0 for r in first]
    confirming = any(map(len, second))

    def p_values(stage: Sequence[Vector]) -> Vector:
        each = zip(leans, stage, limits, steps, strict=True)
        return np.array([p_above(lean * r - limit - step, quiet, apart) for lean, r, limit, step in each])

    p = p_values(first)
    flagged = p <= alpha
    # With a confirmation, the family is what was flagged; without one, it is everything that was tested.
    family = [
        i for i, r in enumerate(second if confirming else first) if len(r) and (flagged[i] or not confirming)
    ]
    adjusted = np.full(len(first), math.nan)
    raw = (p_values(second) if confirming else p)[family]
    adjusted[family] = stats.holm(raw) if one_run else raw
    pooled = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    out = []
    for i, effect in enumerate(all_paired(pooled, floors, 1 - misses)):
        low, high = _interval(pooled[i], effect, apart, misses)
        low, high = low - steps[i], high + steps[i]
        verdict = UnitVerdict.INCONCLUSIVE
        enough = len((second if confirming else first)[i]) >= FEWEST_TO_CLAIM
        if flagged[i] and enough and adjusted[i] <= alpha_confirm:
            verdict = UnitVerdict.REGRESSED if leans[i] > 0 else UnitVerdict.IMPROVED
        elif effect.rounds >= MIN_ROUNDS and high < limits[i]:
            verdict = UnitVerdict.OK
        more, born_apart = None, False
        if verdict is UnitVerdict.INCONCLUSIVE:
            level = alpha_confirm / (len(family) or 1) if one_run else alpha_confirm
            levels = (misses / 2, level)
            more, together = (_more(pooled[i], limits[i], quiet, a, *levels) for a in (apart, 0.0))
            born_apart = more is None and together is not None
        out.append(
            UnitDecision(
                verdict,
                effect,
                low,
                high,
                p=float(p[i]),
                p_confirm=float(adjusted[i]) if confirming else math.nan,
                flagged=bool(flagged[i]),
                fresh=len(second[i]),
                more=more,
                apart=born_apart,
                suspect=low > limits[i] or bool(flagged[i] and leans[i] > 0),
            )
        )
    return out


def misses_of(look: int) -> float:
    """Share of intervals that may miss at a look: 5 %, then 1 %, then half as many each time; 7 % of all looks.

    >>> [misses_of(look) for look in (1, 2, 3)]
    [0.05, 0.01, 0.005]
    """
    return 0.05 if look == 1 else 0.01 / 2 ** (look - 2)


def missing(found: Sequence[UnitDecision], rounds: int, room: float) -> int:
    """Rounds that settle what is open and not flagged; 0 where the room holds none that do.

    At least as many again, and no more than `WIDE` times as many: after those is another look.

    Args:
        found: as the next look would decide them.
        rounds: of the last one.
        room: for more.
    """
    wanted = (max(d.more, rounds) for d in found if d.more and not d.flagged)
    return max((min(more, WIDE * rounds) for more in wanted if more <= room), default=0)


def spread_floor(units: Sequence[Vector], control: Vector | None = None) -> float:
    """The least standard deviation of a round's log ratio that is believed of any unit of a run.

    It is the lower quartile over the units and the control: the few that look quietest by luck are raised to it, and
    those that are noisy by nature do not raise it.
    """
    rows = [*units, *([control] if control is not None else [])]
    spreads = [r.std(ddof=1) for r in rows if len(r) >= FEWEST_TO_FLAG]
    return max(LEAST_SPREAD, float(np.quantile(spreads, 0.25))) if spreads else LEAST_SPREAD


def scatter_of(units: Sequence[Vector]) -> float | None:
    """Standard deviation by which units of equal code differ beyond what their own rounds show; None of few units.

    From the tenth to the median, on the narrower side: what a change made slower, or faster, widens the other one. What
    the rounds themselves explain is taken off.
    """
    rows = [r for r in units if len(r) >= FEWEST_TO_FLAG]
    if len(rows) < FEWEST_TO_CLAIM:
        return None
    low, middle, high = np.quantile([r.mean() for r in rows], (TENTH, 0.5, 1 - TENTH))
    apart = min(middle - low, high - middle) / -ndtri(TENTH)
    own = np.median([r.var(ddof=1) / len(r) for r in rows])
    return math.sqrt(max(0.0, apart**2 - own))


def p_above(excess: Vector, quiet: float, apart: float = 0.0) -> float:
    """One-sided p-value of "the mean is above 0", 1 where it is not or a guard speaks against it."""
    rounds = len(excess)
    if rounds < FEWEST_TO_FLAG or np.count_nonzero(excess <= 0) > rounds // 3 or excess.mean() <= 0:
        return 1.0
    error, degrees = _error(max(excess.std(ddof=1), quiet), rounds, apart)
    return float(stdtr(degrees, -excess.mean() / error))


def _error(spread: float, rounds: int, apart: float) -> tuple[float, int]:
    """Standard error of a mean over rounds, and its degrees of freedom by Welch and Satterthwaite."""
    own, processes = spread**2 / rounds, apart**2
    degrees = (own + processes) ** 2 / (own**2 / (rounds - 1) + processes**2 / SCATTER_DEGREES)
    return math.sqrt(own + processes), math.floor(degrees + 1e-9)


def _interval(logs: Vector, effect: Effect, apart: float, misses: float) -> tuple[float, float]:
    """The interval of the mean: that of the effect where processes are not known to differ."""
    if not apart or len(logs) < 2:
        return effect.log_low, effect.log_high
    error, degrees = _error(logs.std(ddof=1), len(logs), apart)
    half = float(stdtrit(degrees, 1 - misses / 2)) * error
    return effect.log - half, effect.log + half


def _more(logs: Vector, limit: float, quiet: float, apart: float, misses: float, alpha: float) -> int | None:
    """Rounds to add until either the interval or the test decides, if mean and spread stay as they are.

    None where more than `MOST_ROUNDS` are needed. `misses` is that of one end of the interval, `alpha` what one unit of the family has
    to pass.
    """
    rounds = len(logs)
    if rounds < MIN_ROUNDS:
        return FEWEST_TO_CLAIM - rounds
    mean, spread = logs.mean(), max(logs.std(ddof=1), quiet)
    wanted = misses if mean < limit else alpha

    def settled(count: int) -> bool:
        error, degrees = _error(spread, count, apart)
        return bool(stdtr(degrees, -abs(mean - limit) / error) <= wanted)

    counts = range(max(FEWEST_TO_CLAIM, rounds + 1), max(MOST_ROUNDS, rounds + 1) + 1)
    place = bisect.bisect_left(counts, True, key=settled)
    return counts[place] - rounds if place < len(counts) else None
