"""Peer rules: how other gates decide, as their documentation describes it, on the rounds that ours would judge.

| rule | decides by |
|---|---|
| sign flip | this gate until November 2026: exact sign-flip test against the tolerance, p <= 0.01 by Holm, two stages |
| pytest-benchmark | `--benchmark-compare-fail=min:5%`: one run's minimum more than 5 % above one saved run's |
| asv | `asv compare`, `asv continuous`: ratio of the medians above 1.1 and Mann-Whitney's U test p < 0.002 |
| perfgate-paired | the 95 % interval of the mean difference of the pairs, mean -+ 2 s / sqrt(n) below 30 pairs, lies above 0 |
| stackgate | permutation test of the runs, q <= 0.05 by Benjamini and Hochberg, and at least 2 % slower |

Each takes one judgement: many units at once, and says which it calls slower. perfgate has a budget of its own beside the
test, and stackgate judges functions of a sampled profile; only their decision on a slowdown is put here.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from harness.store import stats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

COMPARE_FAIL = 0.05  # of pytest-benchmark's documented example
ASV_FACTOR, ASV_P = 1.1, 0.002
PERFGATE_T, PERFGATE_T_LARGE = 2.0, 1.96  # below 30 pairs, and from there on
STACKGATE_THRESHOLD, STACKGATE_Q = 0.02, 0.05
PERMUTATIONS = 2000
SIGN_FLIP_ALPHA, SIGN_FLIP_CONFIRM = 0.05, 0.01


def pytest_benchmark(times: Array) -> Flags:
    """One run against one saved run: the first baseline process, the last candidate process.

    Args:
        times: [unit, round, side, sample].
    """
    saved, new = times[:, 0, 0].min(axis=-1), times[:, -1, 1].min(axis=-1)
    return np.asarray(new > (1 + COMPARE_FAIL) * saved)


def asv(times: Array) -> Flags:
    """All samples of a side as one: ratio of the medians and a two-sided rank test (normal approximation)."""
    units = len(times)
    sides = np.moveaxis(times, 2, 1).reshape(units, 2, -1)
    ratio = np.median(sides[:, 1], axis=-1) / np.median(sides[:, 0], axis=-1)
    return np.asarray((ratio > ASV_FACTOR) & (np.abs(rank_z(sides)) > NormalDist().inv_cdf(1 - ASV_P / 2)))


def rank_z(sides: Array) -> Array:
    """Standardised rank sum of the second side (Mann and Whitney 1947); ties share a rank and narrow the variance.

    Args:
        sides: [unit, side, sample].

    Returns:
        One z a unit; 0 where all samples are equal.
    """
    count = sides.shape[-1]
    whole = 2 * count
    out = np.zeros(len(sides))
    for unit, samples in enumerate(sides.reshape(len(sides), whole)):
        _, group, sizes = np.unique(samples, return_inverse=True, return_counts=True)
        ranks = np.cumsum(sizes) - (sizes - 1) / 2  # the mean rank of each group of equal samples
        excess = ranks[group.reshape(-1)[count:]].sum() - count * (whole + 1) / 2
        ties = float((sizes.astype(np.float64) ** 3 - sizes).sum()) / (whole * (whole - 1))
        variance = count * count / 12 * (whole + 1 - ties)
        out[unit] = excess / math.sqrt(variance) if len(sizes) > 1 else 0.0
    return out


def perfgate_paired(times: Array) -> Flags:
    """The paired t test of perfgate-paired, whose t is a constant."""
    medians = np.median(times, axis=-1)
    differences = medians[..., 1] - medians[..., 0]
    count = differences.shape[-1]
    t = PERFGATE_T if count < 30 else PERFGATE_T_LARGE
    error = differences.std(axis=-1, ddof=1) / math.sqrt(count)
    return np.asarray(differences.mean(axis=-1) - t * error > 0)


def stackgate(times: Array, random: np.random.Generator) -> Flags:
    """Runs of both sides relabelled at random; Benjamini and Hochberg over the units."""
    medians = np.median(times, axis=-1)
    runs = np.concatenate((medians[..., 0], medians[..., 1]), axis=-1)
    count = medians.shape[1]
    labels = np.where(np.arange(2 * count) < count, -1.0, 1.0)
    orders = random.random((PERMUTATIONS, 2 * count)).argsort(axis=-1)
    observed = runs @ labels
    reached = runs @ labels[orders].T >= observed[:, None] - 1e-12 * np.abs(runs).sum(axis=-1)[:, None]
    p = (1 + reached.sum(axis=-1)) / (1 + PERMUTATIONS)
    change = observed / runs[:, :count].sum(axis=-1)
    return np.asarray((benjamini_hochberg(p) <= STACKGATE_Q) & (change >= STACKGATE_THRESHOLD))


def benjamini_hochberg(p_values: Array) -> Array:
    """Adjusted p-values (Benjamini and Hochberg 1995).

    >>> benjamini_hochberg(np.array([0.01, 0.04, 0.03])).round(4).tolist()
    [0.03, 0.04, 0.04]
    """
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * p_values.size / np.arange(1, p_values.size + 1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.minimum.accumulate(steps[::-1])[::-1], 1.0)
    return adjusted


def sign_flip(first: Array, second: Array, limit: float) -> Flags:
    """The rule of this gate before the t test.

    Args:
        first: log ratios [unit, round].
        second: those of a confirmation; without rounds there is none.
        limit: log(1 + tolerance).
    """
    p = np.array([_flip(rounds, limit) for rounds in first])
    if not second.size:
        return np.asarray(stats.holm(p) <= SIGN_FLIP_CONFIRM)
    found = np.zeros(len(p), dtype=bool)
    (flagged,) = np.nonzero(p <= SIGN_FLIP_ALPHA)
    if flagged.size:
        found[flagged] = stats.holm([_flip(second[i], limit) for i in flagged]) <= SIGN_FLIP_CONFIRM
    return found


def _flip(rounds: Array, limit: float) -> float:
    return stats.sign_flip_p(rounds - limit) if rounds.mean() > limit else 1.0
