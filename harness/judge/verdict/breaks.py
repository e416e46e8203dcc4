"""Breaks: what ends or shakes a run, NaN and spikes (gates L1 and L2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.curves import ema, half_life
from harness.judge.verdict.result import GateResult, Status
from harness.store import stats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from harness.judge.verdict.curves import Pairs, Run
    from harness.store.stats import Vector

SPIKE_STEPS, SPIKE_MADS, SPIKE_SHARE = 3, 6.0, 0.10
GRAD_SPIKE_STEPS, GRAD_SPIKE_TIMES = 5, 10.0
WINDOW_HALF_LIVES = 5  # of the blocks in which the control's noise is taken, and of the running median
FISHER_SEEDS = 8


def finite(candidate: Mapping[int, Run], control: Mapping[int, Run]) -> GateResult:
    """L1: no NaN or infinity in a loss or gradient. Where the control breaks in the same seed, the gate is INCONCLUSIVE."""
    broken = {seed: run.broke_at for seed, run in candidate.items() if run.broke_at is not None}
    base = sorted(seed for seed, run in control.items() if run.broke_at is not None)
    if not broken:
        return GateResult("L1", "PASS", f"finite in all {len(candidate)} runs", seeds=len(candidate))
    where = ", ".join(f"seed {s} at step {step}" for s, step in sorted(broken.items()))
    if set(broken) <= set(base):
        sentence = f"NaN or infinity in {where}; the control broke in the same seeds"
        return GateResult("L1", "INCONCLUSIVE", sentence, seeds=len(candidate))
    return GateResult("L1", "FAIL", f"NaN or infinity in {where}", seeds=len(candidate))


def spikes(pairs: Pairs) -> GateResult:
    """L2: no more spikes than the control has in the same seed.

    From eight seeds on the sentence compares the rates of runs with spikes as well, by Fisher's exact test. That is
    information: eight spikes in every run against one are a fault although as many runs have some.
    """
    mine, theirs = _spike_counts(pairs)
    seeds = len(pairs.seeds)
    more = [s for s, a, b in zip(pairs.seeds, mine, theirs, strict=True) if a > b]
    shown = f"{mine.sum()} spike{'' if mine.sum() == 1 else 's'} against {theirs.sum()} of the control"
    if seeds:
        shown += f" (by seed {', '.join(f'{a}/{b}' for a, b in zip(mine, theirs, strict=True))})"
    status: Status = "FAIL" if more else "PASS"
    if not seeds:
        status, shown = "INCONCLUSIVE", "no pair of runs to count spikes in"
    elif seeds >= FISHER_SEEDS:
        hit, base = int((mine > 0).sum()), int((theirs > 0).sum())
        p = stats.fisher_exact_p(hit, seeds - hit, base, seeds - base)
        shown += (
            f"; for information: {hit} of {seeds} runs with spikes against {base}, Fisher's exact p = {p:.3f}"
        )
    return GateResult(
        "L2", status, shown, effect=float(mine.sum() - theirs.sum()), seeds=seeds, unit="spikes"
    )


def _spike_counts(pairs: Pairs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    life = half_life(pairs.length)
    width = int(WINDOW_HALF_LIVES * life)
    residual = pairs.control - ema(pairs.control, pairs.steps, life)
    noise = np.empty_like(residual)
    for start in range(0, residual.shape[1], width):
        block = residual[:, start : start + width]
        deviation = np.abs(block - np.median(block, axis=1, keepdims=True))
        noise[:, start : start + width] = 1.4826 * np.median(deviation, axis=1, keepdims=True)
    counts = []
    for values in (pairs.candidate, pairs.control):
        smooth = ema(values, pairs.steps, life)
        jump = values > smooth + np.maximum(SPIKE_MADS * noise, SPIKE_SHARE * smooth)
        counts.append(np.array([_runs(row, SPIKE_STEPS) for row in jump], dtype=np.int64))
    if pairs.grad_norm is not None:
        for count, norms in zip(counts, pairs.grad_norm[1:], strict=True):
            count += np.array([_grad_spikes(row, width) for row in norms], dtype=np.int64)
    return counts[0], counts[1]


def _grad_spikes(norms: Vector, width: int) -> int:
    if norms.max() <= GRAD_SPIKE_TIMES * norms.min():
        return 0
    padded = np.concatenate((np.full(width - 1, np.nan), norms))
    running = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    return _runs(norms > GRAD_SPIKE_TIMES * running, GRAD_SPIKE_STEPS)


def _runs(mask: NDArray[np.bool_], least: int) -> int:
    """How many times at least so many consecutive entries are true."""
    if not mask.any():
        return 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return int((edges[1::2] - edges[::2] >= least).sum())
