"""Breaks: what ends or shakes a run, NaN and spikes (gates L1 and L2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.result import (
    LATE,
    MIN_POINTS,
    SPIKES_FAIL,
    SPIKES_UNCLEAR,
    GateResult,
    Status,
    percent,
)
from harness.store import stats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.judge.verdict.curves import Pairs, Run
    from harness.judge.verdict.spike_events import Calm

EXCUSED_TIMES = (
    2.0  # a control that breaks after more than so many times the candidate's steps excuses nothing
)

FIRST = 0.1  # of the steps: where the control begins


def finite(candidate: Mapping[int, Run], control: Mapping[int, Run]) -> GateResult:
    """L1: no NaN or infinity in a loss or gradient. Where the control breaks in the same
    seed, and not much later, the gate is INCONCLUSIVE."""
    broken = {seed: run.broke_at for seed, run in candidate.items() if run.broke_at is not None}
    base = {seed: run.broke_at for seed, run in control.items() if run.broke_at is not None}
    if not broken:
        return GateResult("L1", "PASS", f"finite in all {len(candidate)} runs", seeds=len(candidate))
    # A control that breaks much later is no excuse: the candidate broke by itself.
    excused = {seed for seed, step in broken.items() if seed in base and base[seed] <= EXCUSED_TIMES * step}
    where = ", ".join(
        f"seed {seed} at step {step}" + (f" (control at {base[seed]})" if seed in base else "")
        for seed, step in sorted(broken.items())
    )
    if set(broken) <= excused:
        sentence = f"NaN or infinity in {where}; the control broke in the same seeds"
        return GateResult("L1", "INCONCLUSIVE", sentence, seeds=len(candidate))
    return GateResult("L1", "FAIL", f"NaN or infinity in {where}", seeds=len(candidate))


def spikes(calm: Calm) -> GateResult:
    """L2: no evidence of more bursts of spikes than the control has.

    Under one law for both arms, each run's count could as well be the other arm's. The one-sided p is the share of the
    ways to deal all counts to two arms that give the candidate at least its sum. It needs no law for the counts, so
    runs of which a few have most spikes do not break it; and pairs that resemble each other only make it smaller.
    """
    mine, theirs = calm.bursts
    seeds = mine.size
    if not seeds:
        return GateResult("L2", "INCONCLUSIVE", "no pair of runs to count spikes in", unit="spikes")
    p = stats.larger_sum_p(mine, theirs)
    excess = int(mine.sum() - theirs.sum())
    status: Status = "PASS"
    if excess > 0:
        status = "FAIL" if p <= SPIKES_FAIL else "INCONCLUSIVE" if p <= SPIKES_UNCLEAR else "WARN"
    sentence = (
        f"{mine.sum()} spike{'' if mine.sum() == 1 else 's'} against {theirs.sum()} of the control "
        f"(by seed {', '.join(f'{a}/{b}' for a, b in zip(mine, theirs, strict=True))})"
    )
    if excess > 0:
        sentence += (
            f"; one-sided p of as large a sum under one law {p:.3f} (FAIL up to {SPIKES_FAIL:g}, can't tell up to "
            f"{SPIKES_UNCLEAR:g}); aftershocks count with their spike"
        )
    return GateResult("L2", status, sentence, effect=float(excess), seeds=seeds, unit="spikes")


def idle(pairs: Pairs, margin: float) -> str:
    """Why the control shows nothing: its loss falls by no more than the margin, so that weights that never change would
    be equivalent to it; "" where it falls by more, or there is too little to say.

    Medians, of the first tenth and the last fifth of the steps, so that a spike decides nothing.
    """
    if not pairs.seeds or pairs.steps.size < MIN_POINTS:
        return ""
    share = (pairs.steps - pairs.steps[0]) / (pairs.length - 1)
    first, last = (np.median(pairs.control[:, at], axis=1) for at in (share <= FIRST, share >= 1 - LATE))
    fall = float((first - last).mean() / np.abs(last).mean())
    if fall > margin:
        return ""
    return (
        f"the control's loss {'falls' if fall >= 0 else 'rises'} by {percent(abs(fall))[1:]}; to fall by no more than the margin, "
        f"{percent(margin)[1:]}, takes no learning, so PASS would say nothing: train for longer, or check learning rate and data"
    )
