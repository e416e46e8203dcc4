"""Simulate: the gate's own error rates under noise that is known.

Times are drawn as the session takes them: a round is a pair of processes that take turns, block by block; what comes
out of a round is the ratio of the two medians. The noise has four layers, all on the logarithm of a time: of a sample,
of a process (drawn once for its life), of the machine (drift or a step, shared by blocks that follow one another), and
of a clock that has two states. The verdicts come from `decide`, the function that judges real runs.

Levels are chosen, not measured. `error_rates` puts whole judgements, and the rules of other gates, to the same noise.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.gate.decide import Verdict, decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from harness.gate.policy import Policy

    Array = NDArray[np.float64]

BLOCKS, SAMPLES = 4, 5  # of a process in the simulation
ROUNDS = (5, 6, 8, 10, 16)  # five: what the time allowed holds on a busy machine
EFFECTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # in tolerances
TOLERANCE = 0.03
BAR_ROUNDS = 10  # where power is held to its bar


@dataclass(frozen=True, slots=True)
class Noise:
    """One noise model; standard deviations of the logarithm of a time."""

    name: str
    sample: float = 0.01
    process: float = 0.003
    drift: float = 0.0  # AR(1) from block to block
    memory: float = 0.9  # its coefficient
    step: float = 0.0  # the machine slows by this, for good, at a random block
    clock: float = 0.0  # a process runs at the lower of two clocks, this far apart
    low_clock: float = 0.3  # how often
    tail: float = 0.0  # degrees of freedom of Student's t for the samples; 0: Gaussian
    outlier: float = 0.0  # how often a process is slow as a whole, by 5 % times |normal|
    process_tail: float = 0.0  # degrees of freedom of Student's t for the processes; 0: Gaussian
    burst: float = 0.0  # share of the samples that are interrupted, each 1 to 5 times as long
    trend: float = 0.0  # the machine slows steadily by this over the sitting
    period: float = 0.0  # amplitude of a slow wave, eight turns long
    tick: float = 0.0  # a clock of this resolution, as a share of the time
    second: float = 0.0  # whoever goes second in a turn is this much slower
    session: float = 0.0  # of a whole sitting; cancels where both sides are measured together


NOISES = (
    Noise("Gaussian"),
    Noise("heavy tail", tail=2.0),
    Noise("bimodal clock", clock=0.05),
    Noise("drift", drift=0.03),
    Noise("step", step=0.08),
    Noise("per process", process=0.02),
    Noise("boost clocks", process=0.01, drift=0.01),
    Noise("noisy runner", sample=0.03, process=0.05, drift=0.05, outlier=0.1),
    Noise("quiet", sample=0.001, process=0.0003),
    Noise("interrupted", burst=0.2),
    Noise("half interrupted", burst=0.45),
    Noise("heavy-tailed processes", process=0.005, process_tail=3.0),
    Noise("two layouts", clock=0.1, low_clock=0.5),
    Noise("warming up", trend=0.05),
    Noise("slow wave", period=0.03),
    Noise("coarse clock", tick=0.01),
    Noise("second is slower", second=0.01),
    Noise("sessions", session=0.01),
)
GRID = NOISES[:8]  # in the table by rounds and effects; all of them in `error_rates`


@dataclass(frozen=True, slots=True)
class Cell:
    """What the gate said in one cell of the grid, as counts of trials."""

    noise: str
    rounds: int
    effect: float  # in tolerances
    trials: int
    verdicts: dict[str, int]
    flagged: int
    covered: int  # of the intervals of the first stage, those that hold the truth

    def share(self, verdict: Verdict) -> float:
        """Share of the trials with a verdict."""
        return self.verdicts.get(str(verdict), 0) / self.trials


def draw(noise: Noise, rounds: int, trials: int, random: np.random.Generator) -> Array:
    """Log ratios [trials, rounds] of two sides that are equal, as a session would measure them."""
    medians = np.median(times_of(noise, rounds, trials, random), axis=-1)
    return np.log(medians[..., 1] / medians[..., 0])


def times_of(noise: Noise, rounds: int, trials: int, random: np.random.Generator) -> Array:
    """Times [trials, rounds, side, sample] of two sides that are equal."""
    shape = (trials, rounds, 2)  # the last axis: baseline, candidate
    each = (*shape, BLOCKS, SAMPLES)
    if noise.tail:
        logs = noise.sample * random.standard_t(noise.tail, each)
    else:
        logs = noise.sample * random.standard_normal(each)
    if noise.burst:
        logs += np.log(np.where(random.random(each) < noise.burst, 1 + 4 * random.random(each), 1.0))
    if noise.process_tail:
        process = noise.process * random.standard_t(noise.process_tail, shape)
    else:
        process = noise.process * random.standard_normal(shape)
    process -= noise.clock * (random.random(shape) < 1 - noise.low_clock)
    if noise.outlier:
        slow = random.random(shape) < noise.outlier
        process += slow * 0.05 * np.abs(random.standard_normal(shape))
    logs += process[..., None, None]
    if noise.session:
        logs += noise.session * random.standard_normal((trials, 1, 1, 1, 1))
    if noise.drift or noise.step or noise.trend or noise.period or noise.second:
        logs += _of_the_machine(noise, rounds, trials, random)[..., None]
    times = np.exp(logs).reshape(*shape, BLOCKS * SAMPLES)
    return np.maximum(np.round(times / noise.tick), 1) * noise.tick if noise.tick else times


def _of_the_machine(noise: Noise, rounds: int, trials: int, random: np.random.Generator) -> Array:
    """What both sides share, by place in time: [trials, rounds, side, block], the sides taking turns."""
    slots = rounds * BLOCKS * 2
    level = np.empty((trials, slots))
    level[:, 0] = noise.drift * random.standard_normal(trials)
    fresh = math.sqrt(1 - noise.memory**2) * noise.drift
    for slot in range(1, slots):
        level[:, slot] = noise.memory * level[:, slot - 1] + fresh * random.standard_normal(trials)
    if noise.step:
        level += noise.step * (np.arange(slots) >= random.integers(0, slots, size=(trials, 1)))
    place = np.arange(slots)
    phase = random.random((trials, 1))
    level += noise.trend * place / slots + noise.period * np.sin(2 * np.pi * (place / 16 + phase))
    turns = level.reshape(trials, rounds, BLOCKS, 2) + noise.second * np.arange(2)
    swap = random.random((trials, rounds, BLOCKS)) < 0.5  # which side goes first is drawn for each turn
    turns = np.where(swap[..., None], turns[..., ::-1], turns)
    return np.moveaxis(turns, -1, -2)


def grid(
    policy: Policy,
    trials: int,
    seed: int = 0,
    noises: Sequence[Noise] = GRID,
    rounds: Sequence[int] = ROUNDS,
) -> list[Cell]:
    """Every cell: noise x rounds x effect, both stages. One draw of noise serves all effects of a cell."""
    cells = []
    limit = math.log1p(TOLERANCE)
    for place, noise in enumerate(noises):
        for count in rounds:
            random = np.random.default_rng([seed, place, count])
            first = draw(noise, count, trials, random)
            second = draw(noise, policy.confirm_pairs, trials, random)
            cells += [_cell(noise, e, first, second, limit, policy) for e in EFFECTS]
    return cells


def _cell(noise: Noise, effect: float, first: Array, second: Array, limit: float, policy: Policy) -> Cell:
    trials, rounds = first.shape
    truth = math.log1p(effect * TOLERANCE)
    limits = [limit] * trials
    empty = np.empty(0)
    alone = decide(
        list(first + truth), [empty] * trials, limits, policy.alpha, policy.alpha_confirm, one_run=False
    )
    flagged = [d.flagged for d in alone]
    again = [s + truth if f else empty for s, f in zip(second, flagged, strict=True)]
    both = decide(list(first + truth), again, limits, policy.alpha, policy.alpha_confirm, one_run=False)
    # Where nothing was flagged, `both` had no confirmation to run; then the first stage is the whole of it.
    return Cell(
        noise.name,
        rounds,
        effect,
        trials,
        dict(Counter(str(d.verdict) for d in both)),
        sum(flagged),
        sum(d.low <= truth <= d.high for d in alone),
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise of the gate: the worst figure over the cells that it is about, and whether it holds."""

    text: str
    worst: float
    bound: float
    at_least: bool
    where: str

    @property
    def holds(self) -> bool:
        """Whether the worst figure keeps to the bound."""
        return self.worst >= self.bound if self.at_least else self.worst <= self.bound


def bars(cells: Sequence[Cell]) -> list[Bar]:
    """The gate's promises over a grid."""
    regressed, okay = Verdict.REGRESSED, Verdict.OK
    rates = [
        ("false alarms at no change", 0.01, False, [(c.share(regressed), c) for c in cells if c.effect == 0]),
        (
            "false alarms at exactly the tolerance",
            0.05,
            False,
            [(c.share(regressed), c) for c in cells if c.effect == 1],
        ),
        (
            f"power at twice the tolerance, boost clocks, {BAR_ROUNDS} rounds",
            0.95,
            True,
            [
                (c.share(regressed), c)
                for c in cells
                if (c.noise, c.rounds, c.effect) == ("boost clocks", BAR_ROUNDS, 2)
            ],
        ),
        ("coverage of the 95 % interval", 0.93, True, [(c.covered / c.trials, c) for c in cells]),
        (
            "coverage, Gaussian noise, from above",
            0.97,
            False,
            [(c.covered / c.trials, c) for c in cells if c.noise == "Gaussian"],
        ),
        (
            "called OK at exactly the tolerance, noisy runner",
            0.07,
            False,
            [(c.share(okay), c) for c in cells if (c.noise, c.effect) == ("noisy runner", 1)],
        ),
    ]
    out = []
    for text, bound, at_least, found in rates:
        if not found:
            continue
        worst, cell = (min if at_least else max)(found, key=lambda pair: pair[0])
        out.append(Bar(text, worst, bound, at_least, f"{cell.noise}, {cell.rounds} rounds"))
    return out
