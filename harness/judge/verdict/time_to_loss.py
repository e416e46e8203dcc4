"""Time to loss: the step and the second at which a run first reaches a given loss.

A faster step that learns less is no gain, so this stands beside tokens per second. The loss is the held-out one
where it was taken at least `MIN_EVALUATIONS` times, else the moving average of the training loss (the half-life of
the verdict). Between two points of a curve both step and second are interpolated. "Not reached" is a result: where
any seed does not reach the target there is no mean ratio, since one over the seeds that do would flatter the arm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.curves import Curve, ema, half_life
from harness.judge.verdict.result import MARGIN
from harness.judge.verdict.sooner import crossing, ratio_of_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.judge.verdict.curves import Run, Runs
    from harness.store.stats import Effect

MIN_EVALUATIONS = 5


@dataclass(frozen=True, slots=True)
class Reach:
    """When one arm reached the target.

    Attributes:
        arm: whose runs.
        target: the loss, in nats.
        curve: "held-out loss" or "smoothed training loss".
        steps, seconds: by seed; NaN where the target was not reached or no time was stored.
        step_ratio, second_ratio: arm / control over the seeds of both, below 1 = the arm is there sooner; None where a
            seed did not reach the target, a time is missing, or for the control itself.
    """

    arm: str
    target: float
    curve: str
    steps: Mapping[int, float]
    seconds: Mapping[int, float]
    step_ratio: Effect | None = None
    second_ratio: Effect | None = None

    @property
    def reached(self) -> int:
        """How many seeds reached the target."""
        return sum(math.isfinite(s) for s in self.steps.values())


def time_to_loss(arms: Mapping[str, Runs], control: str = "base", target: float | None = None) -> list[Reach]:
    """When each arm reaches a loss, and how much sooner than the control.

    Args:
        arms: runs by arm and seed.
        control: the arm that the others are held against.
        target: the loss in nats; None takes what counts as the control's: the verdict's margin above the lowest loss
            that every run of the control reaches.

    Returns:
        One entry an arm, the control first; none where the control has no run.

    Raises:
        ValueError: the target is not finite.
    """
    base = arms.get(control, {})
    if not base:
        return []
    every = [run for runs in arms.values() for run in runs.values()]
    smoothed = any(run.heldout is None or run.heldout.steps.size < MIN_EVALUATIONS for run in every)
    if target is None:
        target = (1 + MARGIN) * max(float(np.min(_curve(run, smoothed).values)) for run in base.values())
        if not math.isfinite(target):
            return []  # no run of the control has a finite loss
    if not math.isfinite(target):
        raise ValueError(f"target={target} must be a finite loss in nats")
    own = _reach(control, base, target, smoothed)
    others = (_reach(arm, runs, target, smoothed) for arm, runs in arms.items() if arm != control and runs)
    return [own] + [
        replace(
            reach,
            step_ratio=_ratio(own.steps, reach.steps),
            second_ratio=_ratio(own.seconds, reach.seconds),
        )
        for reach in others
    ]


def _curve(run: Run, smoothed: bool) -> Curve:
    if not smoothed and run.heldout:
        return run.heldout
    stop = int(
        np.argmin(np.append(np.isfinite(run.loss.values), False))
    )  # nothing after the first NaN counts
    if not stop:
        return Curve(run.loss.steps[:1], np.array([math.inf]))
    steps = run.loss.steps[:stop]
    planned = max(run.planned_steps, int(steps[-1]) + 1)
    return Curve(steps, ema(run.loss.values[:stop], steps, half_life(planned)))


def _reach(arm: str, runs: Runs, target: float, smoothed: bool) -> Reach:
    name = "smoothed training loss" if smoothed else "held-out loss"
    curves = {seed: _curve(run, smoothed) for seed, run in sorted(runs.items())}
    steps = {seed: crossing(curve.steps, curve.values, target) for seed, curve in curves.items()}
    # A held-out loss at r follows r updates, a training loss at s precedes update s + 1 but is known with it.
    seconds = {seed: _seconds(runs[seed].elapsed, at + smoothed) for seed, at in steps.items()}
    return Reach(arm, target, name, steps, seconds)


def _seconds(clock: Curve | None, updates: float) -> float:
    """Seconds of training for so many updates: the clock at step s was read after s + 1 of them, and 0 are free."""
    if clock is None or not math.isfinite(updates):
        return math.nan
    return float(np.interp(updates, np.append(0.0, clock.steps + 1), np.append(0.0, clock.values)))


def _ratio(control: Mapping[int, float], mine: Mapping[int, float]) -> Effect | None:
    """Arm over control by seed; None where the seeds differ, or one has no figure."""
    same = control.keys() == mine.keys()  # both in the order of seeds
    return ratio_of_pairs([*control.values()], [*mine.values()]) if same else None
