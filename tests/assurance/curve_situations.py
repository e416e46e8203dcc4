"""Situations of `verdict`: curves of anyone's runs that cannot show that FP8 trains as bf16 does. Each twin passes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from situations import Place, situation

import harness

if TYPE_CHECKING:
    from collections.abc import Callable

Frames = list[pd.DataFrame]
STEPS = np.arange(0, 1001, 100)
of_curves = partial(situation, "verdict", word="CurveVerdict.outcome", positive="PASS")


def runs(seed: int, n: int = 5, sd: float = 0.001) -> Frames:
    """Runs that fall from 4 to 2 nats."""
    noise = np.random.default_rng(seed).normal(0, sd, (n, STEPS.size)).cumsum(axis=1) / np.sqrt(STEPS.size)
    fall = 2 + 2 * np.exp(-STEPS / 100)
    return [pd.DataFrame({"step": STEPS, "val_loss": fall + curve}) for curve in noise]


def planted_in(
    candidate: Callable[[Frames], Frames], base: Callable[[Frames], Frames] = lambda frames: frames
) -> Callable[[Place, bool], object]:
    """Judges five runs a side, changed or not."""

    def run(place: Place, planted: bool) -> object:
        first, second = runs(0), runs(1)
        sides = (base(first), candidate(second)) if planted else (first, second)
        return harness.verdict(*sides).outcome

    return run


def spread(frames: Frames) -> Frames:
    return runs(7, sd=0.05)


def at_the_end(value: float, frames: Frames) -> Frames:
    frames[0].loc[frames[0].index[-1], "val_loss"] = value
    return frames


PLANTED: dict[str, tuple[str, str, Callable[[Place, bool], object]]] = {
    "one_run_a_side": (
        "there is one run a side", "INCONCLUSIVE", planted_in(lambda f: f[:1], lambda f: f[:1])),
    "copied_runs": ("the candidate's runs are one run, copied", "INCONCLUSIVE", planted_in(lambda f: f[:1] * 5)),
    "runs_of_the_base": (
        "the candidate's runs are the base's", "INCONCLUSIVE", planted_in(lambda f: runs(0))),
    "noise_wider_than_the_margin": (
        "runs lie further apart than the margin", "INCONCLUSIVE", planted_in(spread, spread)),
    "idle_base": (
        "the base's loss does not fall", "INCONCLUSIVE",
        planted_in(*[lambda f: [one.assign(val_loss=2 + (one["val_loss"] - 2) * 1e-4) for one in f]] * 2)),
    "run_that_stopped": (
        "a run has rows after its last loss", "INCONCLUSIVE",
        planted_in(lambda f: [f[0].assign(lr=1.0, val_loss=f[0]["val_loss"].where(STEPS < 600)), *f[1:]])),
    "step_0_alone": ("a run has its first losses alone", "INCONCLUSIVE", planted_in(lambda f: [one[:2] for one in f])),
    "other_steps": (
        "the candidate counts tokens where the base counts steps", "INCONCLUSIVE",
        planted_in(lambda f: [one.assign(step=one["step"] * 4096) for one in f])),
    "other_data": (
        "the sides name other data", "INCONCLUSIVE",
        planted_in(lambda f: [one.assign(data="b") for one in f], lambda f: [one.assign(data="a") for one in f])),
    "infinite_end": ("a run of the candidate ends at an infinite loss", "FAIL", planted_in(lambda f: at_the_end(np.inf, f))),
}  # fmt: skip
for name, (what, instead, run) in PLANTED.items():
    run.__name__ = name
    of_curves(what, instead=instead)(run)
