"""Settle: the step from which the gap to the control stays within the noise.

Guides promise it without a criterion ("within noise by step ~1000", KempnerForge docs/distributed/fp8.md); here it is a
figure with an interval. It describes and decides nothing: no gate rests on it.

The noise of FP8 is how far two runs of one recipe drift apart whose weights differ by 1e-4 (RECIPE_eps against RECIPE). Its
limit is the upper 99 % prediction bound, for one more run, of the largest relative gap over the last half of such a pair.
Gaps are smoothed as in the gates, which delays a crossing by about 1.4 half-lives.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.curves import pair, relative_gap
from harness.judge.verdict.result import MARGIN, MIN_POINTS, MIN_SEEDS, percent
from harness.store import stats

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from harness.judge.verdict.curves import Pairs, Runs

BOUND = 0.99  # one-sided, for the largest gap of one more run
COVERAGE = 0.9  # least coverage of the interval of the median where there are enough seeds for it


@dataclass(frozen=True, slots=True)
class Settled:
    """From which step on the smoothed gap stays within a limit.

    Attributes:
        steps: by seed, counted from `start`: 0 where the gap never leaves the limit, infinite where it is outside at the
            end or the candidate met NaN.
        limit: of the smoothed gap, relative to the smoothed loss of the control.
        noise_runs: perturbed pairs that the limit comes from; 0: none were run, and the limit is the verdict's margin.
        start: the step to count from: the switch of a warm-up, else the first logged step.
        logged: steps from `start` to the end of the run.
        problem: why nobody can tell; "" where there is a figure.
    """

    steps: Mapping[int, float]
    limit: float
    noise_runs: int
    start: int
    logged: int
    problem: str = ""

    @property
    def step(self) -> float:
        """Median over seeds, infinite where half of them are not settled; NaN where nobody can tell."""
        return statistics.median(self.steps.values()) if self.steps else math.nan

    @property
    def interval(self) -> tuple[float, float, float]:
        """(low, high, coverage) of the median over seeds; `high` is infinite where the interval is open."""
        return median_interval(self.steps.values()) if self.steps else (math.nan, math.nan, math.nan)

    @property
    def unsettled(self) -> int:
        """How many seeds are outside at the end."""
        return sum(math.isinf(s) for s in self.steps.values())

    @property
    def sentence(self) -> str:
        """The result in words: what the limit is, the step with its interval, and the seeds that never settle."""
        if self.problem:
            return f"could not tell from which step the gap stays within the noise: {self.problem}"
        limit = f"{percent(self.limit)[1:]} of the loss"
        what = f"the margin ({limit}; no perturbed runs of the recipe show its noise)"
        if self.noise_runs:
            what = f"the noise ({limit}, from {self.noise_runs} perturbed pairs of the recipe)"
        seeds, after = len(self.steps), f" after the switch at step {self.start}" if self.start else ""
        outside = f"outside of it after {self.logged:,} steps{after} in {self.unsettled} of {seeds} seeds"
        low, high, coverage = self.interval
        end = f"{high:,.0f}" if math.isfinite(high) else f"beyond {self.logged:,} steps"
        shown = f"median of {seeds} seeds; {100 * coverage:.0f} % interval: step {low:,.0f} to {end}"
        if math.isinf(self.step):
            lower = f" ({shown})" if math.isfinite(low) else ""
            return f"smoothed gap not within {what}: {outside}{lower}"
        if not any(self.steps.values()):
            return f"smoothed gap within {what} at every step{after} of all {seeds} seeds"
        tail = f"; {outside}" if self.unsettled else ""
        return f"smoothed gap within {what} from step {self.step:,.0f}{after} on ({shown}){tail}"


def settle(
    candidate: Runs,
    control: Runs,
    *,
    perturbed: Runs | None = None,
    unperturbed: Runs | None = None,
    start: int = 0,
    margin: float = MARGIN,
) -> Settled:
    """The step from which the candidate's smoothed gap stays within the noise.

    The last departure counts, whatever it comes from: a spike of either run that takes the smoothed gap out of the limit
    moves the step to where the gap has come back, and one that has not come back by the end leaves the seed unsettled.

    Args:
        candidate: runs by seed.
        control: the same.
        perturbed: runs of the candidate's recipe from perturbed weights, for the limit.
        unperturbed: runs of that recipe from the weights themselves.
        start: step to count from; gaps before it are ignored.
        margin: the limit where fewer than `MIN_SEEDS` perturbed runs have a partner, relative to the loss.
    """
    limit, noise_runs = noise_limit(pair(perturbed or {}, unperturbed or {})) or (margin, 0)
    pairs = pair(candidate, control)
    shared = candidate.keys() & control.keys()
    broken = [s for s in shared if candidate[s].broke_at is not None and control[s].broke_at is None]
    inside = pairs.steps >= start
    seeds, points = len(pairs.seeds) + len(broken), int(inside.sum())
    steps: dict[int, float] = {}
    problem = ""
    if seeds < MIN_SEEDS:
        problem = f"{seeds} seeds have a pair, {MIN_SEEDS} are needed"
    elif points < MIN_POINTS:
        problem = f"{points} logged steps, {MIN_POINTS} are needed"
    else:
        # Where each step is followed by the next logged one, a run is settled from the one after the last outside.
        following = np.append(pairs.steps[inside][1:] - start, math.inf)
        gaps = np.abs(relative_gap(pairs, pairs.gap))[:, inside] if pairs.seeds else ()
        for seed, gap in zip(pairs.seeds, gaps, strict=True):
            outside = np.flatnonzero(gap > limit)
            steps[seed] = float(following[outside[-1]]) if outside.size else 0.0
        steps |= dict.fromkeys(broken, math.inf)
    return Settled(
        steps, limit, noise_runs, start, int(pairs.steps[-1]) + 1 - start if points else 0, problem
    )


def noise_limit(noise: Pairs) -> tuple[float, int] | None:
    """(limit, pairs it rests on): the largest relative gap that one more perturbed run shows in its last half; None for
    fewer than `MIN_SEEDS` pairs or `MIN_POINTS` logged steps."""
    if len(noise.seeds) < MIN_SEEDS or noise.steps.size < MIN_POINTS:
        return None
    late = noise.steps >= noise.steps[0] + (noise.steps[-1] - noise.steps[0]) / 2
    peaks = np.abs(relative_gap(noise, noise.gap))[:, late].max(axis=1)
    # The upper end of a two-sided interval that leaves 1 - BOUND above it.
    return stats.prediction_interval(peaks, 2 * BOUND - 1)[1], len(noise.seeds)


def median_interval(values: Collection[float]) -> tuple[float, float, float]:
    """Interval of the median between two order statistics: (low, high, coverage); exact for any distribution.

    The k-th smallest and the k-th largest of n values enclose the median with 1 - 2 P(Binomial(n, 1/2) < k), or more where
    values coincide. k is the largest one whose coverage reaches `COVERAGE`, or 1.

    >>> median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
    (1.0, 5.0, 0.9375)
    """
    from scipy.special import bdtr

    ordered, n = sorted(values), len(values)
    coverage = 1 - 2 * bdtr(np.arange(max(n // 2, 1)), n, 0.5)  # of k = 1, 2, ...
    k = max(int((coverage >= COVERAGE).sum()), 1)
    return ordered[k - 1], ordered[n - k], float(coverage[k - 1])
