"""One effect, whoever asks. Oracle: times with a known ratio; numpy and scipy for the intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.store import stats

if TYPE_CHECKING:
    pass

NARROW = 0.0003  # of the logarithms: the interval is a thousandth wide


def times(factor: float, seed: int, rounds: int = 12) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, NARROW, rounds)
    return list(factor * np.exp(noise - noise.mean()))


def test_many_at_once_are_each_alone() -> None:
    random = np.random.default_rng(1)
    rows = [random.normal(0, 1, n) for n in (3, 0, 5, 3, 1)]
    for one, logs in zip(stats.all_paired(rows), rows, strict=True):
        alone = stats.paired(logs)
        assert str(one) == str(alone)
        assert one.direction == alone.direction


# What differs between environments
