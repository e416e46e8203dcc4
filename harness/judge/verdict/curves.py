"""Curves: what one training run leaves behind, and how the runs of two arms are paired by seed.

Runs of one seed share their initial weights and their batches, which cancels most of the noise: in the
calibration (2 layers, width 48, 300 steps) the sd of the held-out gap falls from 0.0087 nats to 0.0003. So
everything that the gates test is a difference, or a ratio, within a seed; the seed is the unit of every interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.store.proof import ProofOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.stats import Vector


# 2**900 is still finite in float64, and a term that many half-lives old counts for nothing.
_BLOCK_HALF_LIVES = 900
SAME_GAP = 1e-6  # gaps of two seeds that differ by less than this share of themselves are one: rounding of their losses


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
        return cls(np.arange(v.size, dtype=np.float64) if steps is None else np.asarray(steps, np.float64), v)

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
        switch_back_step: the next step at which the precision changed; None where it did not change again.
        nonfinite_step: where the run met NaN or infinity, if its curve was cut there.
        stopped: why the run ended early.
        tokens_per_step: for what a run of this length cannot certify; 0 where that is not known.
        batches: hashes of what it read, by step and "heldout"; empty where that is not known.
        proof: the line of `fp8core.verify` about its FP8 layers; "" where nothing was asked.
        proof_outcome: what it found.
        emulated: its FP8 products were emulated: no FP8 GEMM ran, and there is nothing to prove.
        fp8_grad_norm: norm of the gradients of the converted layers' weights before clipping; None where there are none.
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

    @property
    def disproved(self) -> bool:
        """Whether its FP8 layers were found not to run as asked."""
        return self.proof_outcome is ProofOutcome.DISPROVED

    @property
    def doubted(self) -> bool:
        """Whether its FP8 layers were disproved, or not proved."""
        return self.proof_outcome in (ProofOutcome.DISPROVED, ProofOutcome.UNPROVEN)

    @property
    def broke_at(self) -> int | None:
        """The step at which a loss or gradient first was NaN or infinite; None for a finite run."""
        found = [self.nonfinite_step, self.loss.first_nonfinite]
        found += [
            c.first_nonfinite for c in (self.heldout, self.grad_norm, self.fp8_grad_norm) if c is not None
        ]
        return min((s for s in found if s is not None), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Runs of a candidate and its control that can be compared step by step; rows are seeds.

    Attributes:
        seeds: the seeds, in order, S of them.
        steps: the logged steps, [T].
        candidate, control: losses, [S, T].
        heldout: final held-out losses (candidate, control), [S] each; None where a run lacks one.
        grad_norm: (steps, candidate, control), [G] and [S, G]; None where a run lacks one.
        fp8_grad_norm: (steps, candidate), of the weights of its converted layers; None where a run lacks one.
        problems: why runs were left out, in words; empty if every run has its partner.
    """

    seeds: tuple[int, ...]
    steps: Vector
    candidate: Vector
    control: Vector
    heldout: tuple[Vector, Vector] | None = None
    grad_norm: tuple[Vector, Vector, Vector] | None = None
    problems: tuple[str, ...] = field(default=())
    fp8_grad_norm: tuple[Vector, Vector] | None = None

    @property
    def length(self) -> int:
        """Steps from the first logged one to the last, both counted."""
        return int(self.steps[-1] - self.steps[0]) + 1 if self.steps.size else 0

    @property
    def gap(self) -> Vector:
        """Candidate minus control, [S, T]; positive: the candidate is worse."""
        return self.candidate - self.control


def pair(candidate: Mapping[int, Run], control: Mapping[int, Run], named: str = "candidate") -> Pairs:
    """Pairs runs by seed; runs without a partner, of another length, with NaN or that repeat another seed's are left out
    and named.

    Args:
        candidate: runs by seed.
        control: the same.
        named: what the problems call the candidate.
    """
    problems = []
    for name, one, other in ((named, candidate, control), ("control", control, candidate)):
        missing = sorted(other.keys() - one.keys())
        if missing:
            problems.append(f"the {name} has no run of seed {_list(missing)}")
    reference = max((r.loss.steps for r in control.values()), key=len, default=np.zeros(0))
    whole: list[int] = []
    seen = _Seen(named)
    for seed in sorted(candidate.keys() & control.keys()):
        reasons = [
            f"seed {seed}: the {name} {why}"
            for name, run in ((named, candidate[seed]), ("control", control[seed]))
            if (why := _unusable(run, reference))
        ]
        if where := _read_otherwise(candidate[seed], control[seed]):
            reasons.append(f"seed {seed}: the {named} read other batches than the control ({where})")
        if not reasons:
            reasons = seen.repeats(seed, candidate[seed].loss.values, control[seed].loss.values)
        problems += reasons
        if not reasons:
            whole.append(seed)
    a, b = [candidate[s] for s in whole], [control[s] for s in whole]
    return Pairs(
        tuple(whole),
        reference,
        _stack([r.loss for r in a], reference.size),
        _stack([r.loss for r in b], reference.size),
        _final_heldout(a, b),
        _grad_norms(a, b),
        tuple(problems),
        _at_the_same_steps([r.fp8_grad_norm for r in a]),
    )


def ema(values: Vector, steps: Vector, half_life: float, *, from_zero: bool = False) -> Vector:
    """Exponential moving average along the last axis, by step number, so that sparse logging smooths alike.

    Args:
        values: finite, [..., T].
        steps: strictly increasing, [T].
        half_life: in steps.
        from_zero: the average starts at 0, which a gap does, since both runs start from the same weights.
            Otherwise the weights of the values seen so far are normalised, and the average starts at the first.
    """
    stride = np.diff(steps, prepend=2 * steps[0] - steps[1] if steps.size > 1 else steps[0] - 1)
    weight = 1 - 0.5 ** (stride / half_life)
    out = np.empty_like(values, dtype=np.float64)
    total = np.zeros(values.shape[:-1])
    mass = 0.0
    start = 0
    while start < steps.size:
        stop = int(np.searchsorted(steps, steps[start] + _BLOCK_HALF_LIVES * half_life, side="right"))
        age = (steps[start:stop] - steps[start] + stride[start]) / half_life
        growth = np.exp2(age)
        # e_t 2^(t/h) = e_0 + sum of w_i x_i 2^(i/h): a plain cumulative sum, dominated by its latest terms.
        sums = np.cumsum(weight[start:stop] * growth * values[..., start:stop], axis=-1) + total[..., None]
        masses = np.cumsum(weight[start:stop] * growth) + mass
        average = sums / growth
        mass_now = masses / growth
        out[..., start:stop] = average if from_zero else average / mass_now
        total, mass = average[..., -1], float(mass_now[-1])
        start = stop
    return out


def half_life(steps: int) -> float:
    """Half-life of every moving average: 20 steps for runs of up to 1,000 steps, else 100."""
    return 20.0 if steps <= 1000 else 100.0


def _unusable(run: Run, reference: Vector) -> str:
    """Why a run cannot be compared step by step; empty if it can."""
    if run.broke_at is not None:
        return f"met NaN or infinity at step {run.broke_at}"
    length = run.loss.steps.size
    if length != reference.size:
        why = f" ({run.stopped})" if run.stopped else ""
        return f"has {length} logged steps of {reference.size}{why}"
    if not np.array_equal(run.loss.steps, reference):
        return "was logged at other steps"
    last = int(run.loss.steps[-1]) + 1
    if run.planned_steps > last + _stride(run.loss.steps):
        return f"ended at step {last} of {run.planned_steps}" + (f" ({run.stopped})" if run.stopped else "")
    return ""


class _Seen:
    """The losses and gaps of earlier seeds, to find seeds that repeat them and so are no new evidence."""

    def __init__(self, named: str) -> None:
        self._names = (named, "control")
        self._losses: dict[tuple[str, bytes], int] = {}
        self._gaps: list[tuple[int, float, Vector]] = []

    def repeats(self, seed: int, mine: Vector, theirs: Vector) -> list[str]:
        """What a pair repeats of an earlier seed, in words; empty if it is new, and then it is remembered.

        A gap of 0 at every step is no repetition: a candidate may equal its control in every seed. Neither is a loss of
        the candidate that never changes: a model that FP8 broke predicts the same in every seed.
        """
        keys = [
            (name, values.tobytes())
            for name, values in zip(self._names, (mine, theirs), strict=True)
            if name == "control" or np.ptp(values) > 0
        ]
        repeated = [
            f"seed {seed}: the losses of the {key[0]} repeat those of seed {self._losses[key]} bit for bit"
            for key in keys
            if key in self._losses
        ]
        gap = mine - theirs
        near = SAME_GAP * float(np.abs(gap).max())
        if not repeated and near:
            end = float(gap[-1])
            repeated = [
                f"seed {seed}: the gap of the {self._names[0]} repeats that of seed {other} at every step"
                for other, other_end, other_gap in self._gaps
                if abs(end - other_end) <= near and np.abs(gap - other_gap).max() <= near
            ][:1]
        if not repeated:
            self._losses |= dict.fromkeys(keys, seed)
            self._gaps.append((seed, float(gap[-1]), gap))
        return repeated


def _read_otherwise(run: Run, other: Run) -> str:
    """Where two runs are known to have read different batches; empty if they are not."""
    return ", ".join(
        where if where == "heldout" else f"step {where}"
        for where in run.batches
        if run.batches[where] != other.batches.get(where, run.batches[where])
    )


def _stride(steps: Vector) -> int:
    return int(np.diff(steps).max()) if steps.size > 1 else 1


def _stack(curves: Sequence[Curve], length: int) -> Vector:
    return np.array([c.values for c in curves]) if curves else np.zeros((0, length))


def _final_heldout(candidate: Sequence[Run], control: Sequence[Run]) -> tuple[Vector, Vector] | None:
    """Last held-out loss of each run, where all were taken after the same step, and none before the last logged loss."""
    curves = [r.heldout for r in (*candidate, *control) if r.heldout is not None]
    if len(curves) < len(candidate) + len(control) or len({c.steps[-1] for c in curves}) != 1:
        return None
    if any(r.heldout is not None and r.heldout.steps[-1] < r.loss.steps[-1] for r in (*candidate, *control)):
        return None
    ends = np.array([c.values[-1] for c in curves])
    return ends[: len(candidate)], ends[len(candidate) :]


def _grad_norms(candidate: Sequence[Run], control: Sequence[Run]) -> tuple[Vector, Vector, Vector] | None:
    found = _at_the_same_steps([r.grad_norm for r in (*candidate, *control)])
    return None if found is None else (found[0], found[1][: len(candidate)], found[1][len(candidate) :])


def _at_the_same_steps(curves: Sequence[Curve | None]) -> tuple[Vector, Vector] | None:
    """(steps, values by curve); None where one is missing or has other steps, and for no curves."""
    there = [c for c in curves if c is not None]
    if not there or len(there) < len(curves):
        return None
    steps = there[0].steps
    if any(not np.array_equal(c.steps, steps) for c in there):
        return None
    return steps, np.array([c.values for c in there])


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
