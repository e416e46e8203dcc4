"""Decide: from rounds to a verdict. Arrays in, arrays out; the judge and the self-test both call this and nothing else.

A positive log ratio is worse. `limit` is log(1 + tolerance). With r the rounds of the first stage and s those of the
confirmation, for the direction d in which r leans:

    flagged     exact one-sided sign-flip test of d * r - limit gives p <= alpha
    confirmed   the same test of d * s - limit on fresh data, Holm over all that was flagged, gives p <= alpha_confirm
    REGRESSED   confirmed with d > 0;  IMPROVED   confirmed with d < 0
    OK          neither, and the upper end of the 95 % t interval over all rounds lies below the limit
    INCONCLUSIVE   anything else

The test is against the limit and not against zero, so a slowdown of exactly the tolerance is a false alarm, and its
rate is what alpha bounds. Where nothing was measured again, the first stage has to pass alpha_confirm itself, with
Holm over every unit: it then stands alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from harness.store import stats
from harness.store.effect import MIN_ROUNDS, Effect, all_paired

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store.stats import Vector

MOST_ROUNDS = 1000  # no one measures more: then the answer is that the change sits at the tolerance


class Verdict(StrEnum):
    """Verdict of the gate on one unit."""

    REGRESSED = "REGRESSED"
    OK = "OK"
    IMPROVED = "IMPROVED"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(slots=True)
class Decision:
    """The verdict on one unit and the figures behind it, in logarithms; positive is worse."""

    verdict: Verdict
    effect: Effect
    p: float  # of the first stage, in the direction in which it leans; 1 where it is within the limit
    p_confirm: float  # Holm-adjusted; NaN where nothing was measured again
    flagged: bool
    fresh: int = 0  # rounds of the confirmation, which `rounds` holds too
    more: int | None = None  # rounds that would settle an INCONCLUSIVE one; None: no reasonable number

    @property
    def mean(self) -> float:
        """Mean log ratio of the effect."""
        return self.effect.log

    @property
    def low(self) -> float:
        """Lower end of the effect's interval."""
        return self.effect.log_low

    @property
    def high(self) -> float:
        """Upper end of the effect's interval."""
        return self.effect.log_high

    @property
    def rounds(self) -> int:
        """Number of rounds of the effect."""
        return self.effect.rounds


def decide(
    first: Sequence[Vector],
    second: Sequence[Vector],
    limits: Sequence[float],
    alpha: float = 0.05,
    alpha_confirm: float = 0.01,
    *,
    one_run: bool = True,
    floors: Sequence[float] = (),
) -> list[Decision]:
    """The verdict on each unit.

    Args:
        first: log ratios of the first stage by unit; all finite; may be empty.
        second: those of the confirmation; empty where a unit was not measured again.
        limits: log(1 + tolerance) of each unit.
        alpha: of the first stage.
        alpha_confirm: of the confirmation.
        floors: noise floor of each unit as a ratio, NaN where it is not known; it decides nothing here.
        one_run: the units are those of one run, so Holm runs over them; False: each is a run of its own.
    """
    directions, p_values = _one_sided(first, limits)
    flagged = p_values <= alpha
    confirming = bool(any(len(s) for s in second))
    # With a confirmation, the family is what was flagged; without one, it is everything that was tested.
    candidates = [
        i for i in range(len(first)) if (flagged[i] and len(second[i]) if confirming else len(first[i]))
    ]
    adjusted = np.full(len(first), np.nan)
    raw = [
        _p(directions[i] * second[i] - limits[i]) if confirming else float(p_values[i]) for i in candidates
    ]
    adjusted[candidates] = stats.holm(raw) if one_run else raw
    pooled = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    effects = all_paired(pooled, floors)
    out = []
    for i, rounds in enumerate(map(len, pooled)):
        verdict = Verdict.INCONCLUSIVE
        if flagged[i] and adjusted[i] <= alpha_confirm:
            verdict = Verdict.REGRESSED if directions[i] > 0 else Verdict.IMPROVED
        elif rounds >= MIN_ROUNDS and effects[i].log_high < limits[i]:
            verdict = Verdict.OK
        decision = Decision(
            verdict,
            effects[i],
            p=float(p_values[i]),
            p_confirm=float(adjusted[i]) if confirming else math.nan,
            flagged=bool(flagged[i]),
            fresh=len(second[i]),
        )
        if verdict is Verdict.INCONCLUSIVE:
            family = max(len(candidates), 1) if one_run else 1
            decision.more = _more(pooled[i], limits[i], alpha_confirm, family)
        out.append(decision)
    return out


def _one_sided(rounds: Sequence[Vector], limits: Sequence[float]) -> tuple[Vector, Vector]:
    """Direction in which each unit leans, and the p-value of leaning further than the limit."""
    directions, p_values = np.ones(len(rounds)), np.ones(len(rounds))
    for i, logs in enumerate(rounds):
        if not len(logs):
            continue
        mean = float(logs.mean())
        directions[i] = -1.0 if mean < 0 else 1.0
        # Within the limit the p-value is above one half, whatever it is; it need not be counted.
        if abs(mean) > limits[i]:
            p_values[i] = _p(directions[i] * logs - limits[i])
    return directions, p_values


def _p(differences: Vector) -> float:
    return stats.sign_flip_p(differences)


def fewest_rounds(family: int, alpha: float) -> int:
    """Rounds below which not even a unit that is worse in all of them passes Holm: the smallest p is 2**-rounds.

    >>> fewest_rounds(1, 0.01), fewest_rounds(200, 0.01)
    (7, 15)
    """
    return math.ceil(math.log2(family / alpha))


def _more(logs: Vector, limit: float, alpha: float, family: int) -> int | None:
    """Rounds to add until either the interval or the test decides, if mean and spread stay as they are."""
    rounds = len(logs)
    floor = fewest_rounds(family, alpha)
    if rounds < MIN_ROUNDS:
        return max(floor, 2 * MIN_ROUNDS) - rounds
    away = abs(float(logs.mean()) - limit)
    spread = float(logs.std(ddof=1))
    # By then there are many rounds, so not the quantile of those at hand, which for three is six times as large.
    quantile = stats.t_quantile(1 - min(alpha / family, 0.025), max(rounds, 30))
    if away * math.sqrt(MOST_ROUNDS) <= quantile * spread:
        return None
    needed = math.ceil((quantile * spread / away) ** 2)
    return max(needed, floor, rounds + 1) - rounds
