"""Curves: what one training run leaves behind, and how the runs of two arms are paired by seed.

Runs of one seed share their initial weights and their batches, which cancels most of the noise: in the
calibration (2 layers, width 48, 300 steps) the sd of the held-out gap falls from 0.0087 nats to 0.0003. So
everything that the gates test is a difference, or a ratio, within a seed; the seed is the unit of every interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.store.measurement import ProofOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.store.stats import Vector

    Runs = Mapping[int, "Run"]  # by seed


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One quantity over the steps of a run.

    Args:
        steps: step numbers, strictly increasing, [T].
        values: float64, [T]; not finite where the run met NaN or infinity.

    Raises:
        ValueError: lengths differ, the curve is empty, or the steps do not increase.
    """

    steps: Vector
    values: Vector

    def __post_init__(self) -> None:
        if self.steps.ndim != 1 or self.steps.shape != self.values.shape or not self.steps.size:
            raise ValueError(
                f"a curve needs as many steps as values, at least one; got {self.steps.shape} and {self.values.shape}"
            )
        if not (np.diff(self.steps) > 0).all():
            raise ValueError("the steps of a curve must increase")

    @classmethod
    def of(cls, values: Sequence[float] | Vector, steps: Sequence[int] | Vector | None = None) -> Curve:
        """A curve from anything that numpy takes; without steps they are 0, 1, 2, ..."""
        v = np.asarray(values, dtype=np.float64)
        return cls(np.asarray(np.arange(v.size) if steps is None else steps, np.float64), v)

    @property
    def first_nonfinite(self) -> int | None:
        """The first step whose value is NaN or infinite."""
        finite = np.isfinite(self.values)
        return None if finite.all() else int(self.steps[np.argmin(finite)])


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One training run: one arm, one seed.

    Attributes:
        loss: training loss in nats, logged in fp32.
        heldout: loss on the fixed held-out windows after so many updates; the last one is taken as the final one.
        grad_norm: norm of the whole gradient before any clipping.
        elapsed: seconds of training until the end of each step; evaluation and diagnostics left out, as `METRICS` says.
        planned_steps: how many steps the run was meant to have; 0 where that is not known.
        switch_step: the first step that ran in the other precision; None for a run of one precision.
        nonfinite_step: where the run met NaN or infinity, if its curve was cut there.
        stopped: why the run ended early.
        tokens_per_step: for what a run of this length cannot certify; 0 where that is not known.
        batches: hashes of what it read, by step and "heldout"; empty where that is not known.
        settings: whatever else the runs of a pair must have in common, by name.
        proof: the line of `fp8core.verify` about its FP8 layers; "" where nothing was asked.
        proof_outcome: what it found.
        emulated: its FP8 products were emulated: no FP8 GEMM ran, and there is nothing to prove.
        fp8_grad_norm: norm of the gradients of the converted layers' weights before clipping; None where there are none.
        switch_back_step: the next step at which the precision changed; None where it did not change again.
    """

    loss: Curve
    heldout: Curve | None = None
    grad_norm: Curve | None = None
    elapsed: Curve | None = None
    planned_steps: int = 0
    switch_step: int | None = None
    nonfinite_step: int | None = None
    stopped: str = ""
    tokens_per_step: float = 0.0
    batches: Mapping[str, str] = field(default_factory=dict)
    proof: str = ""
    proof_outcome: ProofOutcome = ProofOutcome.NONE
    emulated: bool = False
    fp8_grad_norm: Curve | None = None
    switch_back_step: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def disproved(self) -> bool:
        """Whether its FP8 layers were found not to run as asked."""
        return self.proof_outcome is ProofOutcome.DISPROVED

    @property
    def doubted(self) -> bool:
        """Whether its FP8 layers were disproved, or not proved."""
        return self.disproved or self.proof_outcome is ProofOutcome.UNPROVEN

    @property
    def broke_at(self) -> int | None:
        """The step at which a loss or gradient first was NaN or infinite; None for a finite run."""
        curves = (self.loss, self.heldout, self.grad_norm, self.fp8_grad_norm)
        steps = [self.nonfinite_step, *(curve.first_nonfinite for curve in curves if curve)]
        return min((step for step in steps if step is not None), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Runs of a candidate and its control that can be compared step by step; rows are seeds.

    Attributes:
        seeds: the seeds, in order, S of them.
        steps: the logged steps, [T].
        candidate, control: losses, [S, T].
        heldout: final held-out losses (candidate, control), [S] each; None where a run lacks one.
        grad_norm: (steps, candidate, control), [G] and [S, G]; None where a run lacks one.
        problems: why runs were left out, in words; empty if every run has its partner.
        fp8_grad_norm: (steps, candidate), of the weights of its converted layers; None where a run lacks one.
    """

    seeds: tuple[int, ...]
    steps: Vector
    candidate: Vector
    control: Vector
    heldout: tuple[Vector, Vector] | None = None
    grad_norm: tuple[Vector, Vector, Vector] | None = None
    problems: tuple[str, ...] = ()
    fp8_grad_norm: tuple[Vector, Vector] | None = None


def pair(candidate: Runs, control: Runs, named: str = "candidate") -> Pairs:
    """Pairs runs by seed; runs without a partner, of another length or with NaN are left out and named.

    Args:
        candidate: runs by seed.
        control: the same.
        named: what the problems call the candidate.
    """
    sides = {named: candidate, "control": control}
    steps = max((run.loss.steps for run in control.values()), key=len, default=np.zeros(0))
    problems = [
        f"the {name} has no run of seed {', '.join(map(str, missing))}"
        for name, runs in sides.items()
        if (missing := sorted({*candidate, *control} - runs.keys()))
    ]
    whole: dict[int, Vector] = {}  # losses of both, [2, T], of the seeds that are whole
    for seed in sorted(candidate.keys() & control.keys()):
        run, other = candidate[seed], control[seed]
        reasons = [
            f"the {name} {why}" for name, runs in sides.items() for why in _unusable(runs[seed], steps)
        ]
        own, its = (
            {f"batch {at}": digest for at, digest in r.batches.items()}
            | {"tokens_per_step": r.tokens_per_step, "planned_steps": r.planned_steps, **r.settings}
            for r in (run, other)
        )
        if unlike := [what for what in own | its if own.get(what) != its.get(what)]:
            reasons.append(f"the {named} and the control differ in {', '.join(unlike)}")
        if not reasons:
            whole[seed] = np.array([run.loss.values, other.loss.values])
        problems += [f"seed {seed}: {why}" for why in reasons]
    a, b = ([runs[seed] for seed in whole] for runs in sides.values())
    losses = np.reshape([*whole.values()], (len(whole), 2, steps.size))
    norms = at_the_same_steps([r.grad_norm for r in (*a, *b)])
    return Pairs(
        tuple(whole),
        steps,
        losses[:, 0],
        losses[:, 1],
        _final_heldout(a, b),
        norms and (norms[0], norms[1][: len(a)], norms[1][len(a) :]),
        tuple(problems),
        at_the_same_steps([r.fp8_grad_norm for r in a]),
    )


def _unusable(run: Run, reference: Vector) -> Iterator[str]:
    """Why a run cannot be compared step by step; nothing if it can."""
    steps = run.loss.steps
    why = f" ({run.stopped})" if run.stopped else ""
    if run.broke_at is not None:
        yield f"met NaN or infinity at step {run.broke_at}"
    elif steps.size != reference.size:
        yield f"has {steps.size} logged steps of {reference.size}{why}"
    elif not np.array_equal(steps, reference):
        yield "was logged at other steps"
    elif run.planned_steps > int(steps[-1]) + 1 + int(np.diff(steps).max(initial=1)):
        yield f"ended at step {int(steps[-1]) + 1} of {run.planned_steps}{why}"


def _final_heldout(candidate: Sequence[Run], control: Sequence[Run]) -> tuple[Vector, Vector] | None:
    """Last held-out loss of each run, where all were taken after the same step, and none before the last logged loss; one that
    never changes is none."""
    last = [
        (r.heldout.steps[-1], r.heldout.values[-1])
        for r in (*candidate, *control)
        if r.heldout
        and r.heldout.steps[-1] >= r.loss.steps[-1]
        and (r.heldout.values.size == 1 or np.ptp(r.heldout.values))
    ]
    steps, ends = np.reshape(last, (-1, 2)).T
    if len(last) < 2 * len(control) or len(set(steps)) != 1:
        return None
    return ends[: len(candidate)], ends[len(candidate) :]


def at_the_same_steps(curves: Sequence[Curve | None]) -> tuple[Vector, Vector] | None:
    """(steps, values by curve); None where one is missing or has other steps, and for no curves."""
    there = [curve for curve in curves if curve]
    if not there or len(there) < len(curves):
        return None
    steps = there[0].steps
    same = all(np.array_equal(curve.steps, steps) for curve in there)
    return (steps, np.array([curve.values for curve in there])) if same else None


def ema(values: Vector, steps: Vector, half_life: float, *, from_zero: bool = False) -> Vector:
    """Exponential moving average along the last axis, by step number, so that sparse logging smooths alike.

    Args:
        values: finite, [..., T].
        steps: strictly increasing, [T].
        half_life: in steps.
        from_zero: the average starts at 0, which a gap does, since both runs start from the same weights.
            Otherwise the weights of the values seen so far are normalised, and the average starts at the first.
    """
    from scipy.linalg import solve_banded

    stride = np.diff(steps, prepend=2 * steps[0] - steps[1] if steps.size > 1 else steps[0] - 1)
    decay = 0.5 ** (stride / half_life)
    # e_t - decay_t e_(t - 1) = (1 - decay_t) x_t for all steps: two diagonals
    bands = np.array([np.ones_like(decay), np.append(-decay[1:], 0)])
    terms = np.reshape((1 - decay) * values, (-1, steps.size)).T
    average = np.reshape(solve_banded((1, 0), bands, terms).T, values.shape)
    return np.asarray(average if from_zero else average / (1 - np.cumprod(decay)), np.float64)


def relative_gap(pairs: Pairs) -> Vector:
    """The smoothed gap of paired runs over the smoothed loss of their control, [S, T]; at least one pair."""
    life = half_life(int(pairs.steps[-1] - pairs.steps[0]) + 1)
    gap = ema(pairs.candidate - pairs.control, pairs.steps, life, from_zero=True)
    return np.asarray(gap / ema(pairs.control, pairs.steps, life), np.float64)


def half_life(steps: int) -> float:
    """Half-life of every moving average: 20 steps for runs of up to 1,000 steps, else 100."""
    return 20.0 if steps <= 1000 else 100.0
