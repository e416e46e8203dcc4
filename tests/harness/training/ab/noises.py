"""Step times of a loop under planted noise, dealt to the arms by the trial's own plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from harness.training.ab.result import FP8, TrialPlan, TrialResult, TrialRound

Vector = NDArray[np.float64]
Noise = Callable[
    [np.random.Generator, int], Vector
]  # (generator, steps) -> log of the factor on each step's time


def quiet(rng: np.random.Generator, steps: int) -> Vector:
    """One percent, independent."""
    return rng.normal(0, 0.01, steps)


def simulated(noise: Noise, speedup: float, seed: int, plan: TrialPlan | None = None) -> TrialResult:
    """A trial whose FP8 steps take 1 / speedup of bf16's, under a noise."""
    rng = np.random.default_rng(seed)
    plan = plan or TrialPlan(seed=seed)
    turns = list(plan.turns())
    logs = noise(rng, len(turns))
    times: dict[int, dict[str, list[float]]] = {}
    for turn, log in zip(turns, logs, strict=True):
        if turn.purpose == "timed":
            step = 100.0 / (speedup if turn.arm == FP8 else 1.0)
            times.setdefault(turn.round, {}).setdefault(turn.arm, []).append(step * float(np.exp(log)))
    rounds = tuple(TrialRound(i, {arm: tuple(v) for arm, v in arms.items()}) for i, arms in times.items())
    return TrialResult(
        recipe="tensorwise", device="cuda", rounds=rounds, method="simulated", proved=True, proof="simulated"
    )
