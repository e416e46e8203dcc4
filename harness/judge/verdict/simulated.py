"""Simulated runs: loss curves of a candidate and its control, seed by seed, with a known truth.

A control falls from 3.5 to 2.1 nats with AR(1) noise of its own. The candidate of the same seed shares that noise, as
paired runs do, and adds a gap: a constant that differs between seeds and AR(1) noise, which together give the paired
late-window mean a standard deviation between seeds of exactly `sd`. The held-out gap has the same deviation and shares
the constant: both are gaps of the same final weights, and two independent ones would flatter the verdict.

Everything else that is planted is a pair (candidate, control). So each fault has its honest twin: the same figure on
both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.judge.verdict.curves import Curve, Run, ema
from harness.judge.verdict.result import LATE, MARGIN

if TYPE_CHECKING:
    from numpy.random import Generator

    from harness.store.stats import Vector

START, END = 3.5, 2.1  # nats
STEPS = 300
AR = 0.9  # lag-1 correlation of the noise within a run
BETWEEN = 0.5  # share of the variance of a late mean that is constant within a seed, and shared with the held-out gap
DRIFT_FROM = 0.1  # a drift grows with log(step) from this share of the run on
DIVERGES_FROM = 0.75  # a late divergence grows exponentially from this share of the run on
# Law of a spike: height and decay are log-normal; each spike has Poisson(1) aftershocks.
SPIKE_NATS, SPIKE_NATS_SPREAD = 0.8, 0.5
SPIKE_DECAY_STEPS, SPIKE_DECAY_SPREAD = 5.0, 0.5
SPIKE_RISE_STEPS = 2
AFTERSHOCKS, AFTERSHOCK_DELAY_STEPS = 1.0, 15.0
GRAD_PER_NAT = 25.0  # a spike of one nat multiplies the gradient norm by 1 + this

Pair = tuple[float, float]  # candidate, control


@dataclass(frozen=True, slots=True)
class Scenario:
    """A planted truth.

    Attributes:
        name: what was planted, in words.
        seeds: pairs of runs.
        sd: between seeds, of the paired late mean; in margins.
        offset: the true gap, in margins.
        tails: distribution of all noise: normal, or Student's t with 3 degrees of freedom, of the same variance.
        across: share of the paired gap's variance that all seeds have in common; the gates assume 0.
        drift: gap at the end, in margins; grows with log(step).
        divergence: nats at the end.
        bump: over the first fifth of the early window's steps, in shares of the loss.
        one_spike: nats, for six steps in the middle of the first seed.
        spikes: expected spikes of a run, aftershocks not counted.
        clumping: variance of the runs' own spike rates, relative to the squared mean; 0: one rate for all runs.
        spike_in_every_run: one spike in each run, at a random step.
        nan: the last steps of the first seed.
        copies: "runs": each seed repeats the first one's runs; "control": only the control's.
    """

    name: str
    seeds: int = 5
    sd: float = 0.25
    offset: float = 0.0
    tails: Literal["normal", "t3"] = "normal"
    across: float = 0.0
    drift: Pair = (0.0, 0.0)
    divergence: Pair = (0.0, 0.0)
    bump: Pair = (0.0, 0.0)
    one_spike: Pair = (0.0, 0.0)
    spikes: Pair = (0.0, 0.0)
    clumping: float = 0.0
    spike_in_every_run: tuple[bool, bool] = (False, False)
    nan: tuple[bool, bool] = (False, False)
    copies: Literal["", "runs", "control"] = ""


def draw(scenario: Scenario, steps: int, generator: Generator) -> tuple[dict[int, Run], dict[int, Run]]:
    """Runs of a candidate and its control, by seed."""
    seeds, t = scenario.seeds, np.arange(steps, dtype=np.float64)
    margin = MARGIN * END
    sd = scenario.sd * margin
    alone = math.sqrt(1 - scenario.across)
    fall = END + (START - END) * np.exp(-t / (steps / 8))
    shared = fall + 0.01 * _ar1(generator, scenario.tails, seeds, steps)
    scale = sd * alone * math.sqrt(1 - BETWEEN)
    within = _ar1(generator, scenario.tails, seeds, steps) * (scale / _mean_sd(round(LATE * steps)))
    between = sd * alone * math.sqrt(BETWEEN) * _noise(generator, scenario.tails, (seeds,))
    offset = scenario.offset * margin + sd * math.sqrt(scenario.across) * _noise(
        generator, scenario.tails, ()
    )
    ends_within = scale * _noise(generator, scenario.tails, (seeds,))
    norms = np.exp(generator.normal(0, 0.1, (seeds, steps)))
    ratios = np.exp(generator.normal(0, 0.01, (seeds, steps)))
    runs = []
    for side, gap, gap_at_end in (
        (0, offset + between[:, None] + within, offset + between + ends_within),
        (1, np.zeros((seeds, steps)), np.zeros(seeds)),
    ):
        added = _planted(scenario, side, t, fall)
        spikes = _spikes(scenario, side, steps, generator)
        loss = shared + gap + added + spikes
        heldout = shared[:, -1] + gap_at_end + added[-1] + spikes[:, -1]
        if scenario.nan[side]:
            loss[0, -steps // 20 :] = math.nan
        grad = norms * (ratios if side == 0 else 1.0) * (1 + GRAD_PER_NAT * spikes)
        runs.append([_run(*of_seed) for of_seed in zip(loss, heldout, grad, strict=True)])
    candidate, control = runs
    if scenario.copies == "runs":
        candidate = candidate[:1] * seeds
    if scenario.copies:
        control = control[:1] * seeds
    return dict(enumerate(candidate)), dict(enumerate(control))


def _planted(scenario: Scenario, side: int, t: Vector, fall: Vector) -> Vector:
    """What is the same in all runs of one side, but for spikes; nats by step."""
    steps = t.size
    growth = np.clip(np.log10(np.maximum(t, 1) / (DRIFT_FROM * steps)), 0, None)
    late = np.clip((t / steps - DIVERGES_FROM) / (1 - DIVERGES_FROM), 0, None)
    return np.asarray(
        scenario.drift[side] * MARGIN * END * growth
        + scenario.divergence[side] * np.expm1(4 * late) / math.expm1(4)
        + np.where(t < steps / 15, scenario.bump[side], 0) * fall
    )


def _spikes(scenario: Scenario, side: int, steps: int, generator: Generator) -> Vector:
    """Nats that spikes add, [seeds, steps]."""
    added = np.zeros((scenario.seeds, steps))
    added[0, steps // 2 : steps // 2 + 6] += scenario.one_spike[side]
    rate = scenario.spikes[side]
    for row in added:
        own = rate * (generator.gamma(1 / scenario.clumping, scenario.clumping) if scenario.clumping else 1)
        count = int(generator.poisson(own)) + scenario.spike_in_every_run[side]
        for start in generator.uniform(0.05, 1, count) * steps:
            nats = SPIKE_NATS * math.exp(generator.normal(0, SPIKE_NATS_SPREAD))
            _add_spike(row, start, nats, generator)
            for delay in generator.exponential(AFTERSHOCK_DELAY_STEPS, generator.poisson(AFTERSHOCKS)):
                _add_spike(row, start + delay, nats * generator.uniform(0.3, 0.9), generator)
    return added


def _add_spike(row: Vector, start: float, nats: float, generator: Generator) -> None:
    """Adds one spike: a short linear rise, then an exponential decay."""
    first = int(start)
    age = np.arange(max(row.size - first, 0))
    decay = SPIKE_DECAY_STEPS * math.exp(generator.normal(0, SPIKE_DECAY_SPREAD))
    rise = np.minimum(1, (age + 1) / SPIKE_RISE_STEPS)
    row[first:] += nats * rise * np.exp(-np.maximum(age - SPIKE_RISE_STEPS + 1, 0) / decay)


def _run(loss: Vector, heldout: float, norms: Vector) -> Run:
    return Run(Curve.of(loss), heldout=Curve.of([heldout], [loss.size]), grad_norm=Curve.of(norms))


def _noise(generator: Generator, tails: str, shape: tuple[int, ...]) -> Vector:
    """Independent values of unit variance."""
    if tails == "t3":
        return np.asarray(generator.standard_t(3, shape) / math.sqrt(3))
    return np.asarray(generator.normal(0, 1, shape))


def _ar1(generator: Generator, tails: str, seeds: int, steps: int) -> Vector:
    """Stationary AR(1) noise of unit variance, [seeds, steps]."""
    noise = _noise(generator, tails, (seeds, steps))
    noise[:, 1:] *= math.sqrt(1 - AR * AR)
    # x_t = AR x_(t-1) + e_t is, but for a factor, a moving average that forgets with AR a step.
    return ema(noise, np.arange(steps, dtype=np.float64), -1 / math.log2(AR), from_zero=True) / (1 - AR)


def _mean_sd(count: int) -> float:
    """Standard deviation of the mean of so many successive values of unit AR(1) noise.

    Var = (1 + 2 sum over k of (1 - k/n) AR^k) / n.
    """
    lags = np.arange(1, count)
    return float(math.sqrt((1 + 2 * ((1 - lags / count) * AR**lags).sum()) / count))
