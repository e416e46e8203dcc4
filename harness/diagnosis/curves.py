"""Curves: a loss that leaves its control's at once, and one that spikes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness import verdict
from harness.diagnosis.casts import worst_layers
from harness.diagnosis.finding import Finding
from harness.verdict.rows import CONTROL, NEGATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.diagnosis.finding import Material
    from harness.verdict import Run

EARLY_STEPS = 50
DIVERGED = 0.10  # smoothed gap, of the control's loss
EARLY_HALF_LIFE = 5.0


def early_divergence(material: Material) -> Iterator[Finding]:
    """A loss that leaves its control's within the first 50 steps, with LR, warm-up and the worst layer."""
    for setup in material.setups:
        for arm, runs in setup.arms.items():
            facts = setup.resolved.get(arm, {})
            if arm.startswith(CONTROL) or arm == NEGATIVE:
                continue
            base = setup.arms.get(CONTROL, {})
            seen = {s: where for s, run in runs.items() if (where := _diverged(run, base.get(s)))}
            if not seen:
                continue
            schedule = facts.get("lr_schedule")
            schedule = schedule if isinstance(schedule, dict) else {}
            lr = setup.axes.get("lr", schedule.get("lr"))
            rise = schedule.get("rise_steps")
            evidence = [
                f"{len(seen)} of {len(runs)} seeds: " + "; ".join(f"seed {s} {w}" for s, w in seen.items())
            ]
            evidence.append(
                f"learning rate {lr}, warm-up {'of unknown length' if rise is None else f'{rise} steps'}"
            )
            evidence += worst_layers(material, setup, arm)
            both = [s for s in seen if s in base and base[s].broke_at is not None]
            cause = (
                "the control breaks as well: the learning rate is too high for this set-up, FP8 or not"
                if both
                else "the learning rate suits exact gradients, and FP8's rounding noise makes the first steps too long"
            )
            half = (
                f"axes.lr={lr / 2:g}"
                if isinstance(lr, int | float) and not isinstance(lr, bool)
                else "a smaller lr"
            )
            yield Finding(
                f"{arm} diverges within the first {EARLY_STEPS} steps",
                tuple(evidence),
                cause,
                f"{half}, a longer warm-up, or schedule=warmup_bf16:{2 * EARLY_STEPS}, which starts FP8 after the worst is over",
            )


def loss_spikes(material: Material) -> Iterator[Finding]:
    """More loss or gradient spikes than the control has."""
    for v in material.verdicts:
        gate = v.verdict.gate("L2")
        if gate is not None and gate.status in ("FAIL", "WARN") and v.arm != NEGATIVE:
            setup = next(s for s in material.setups if (s.run_id, s.axes) == (v.run_id, v.axes))
            yield Finding(
                f"{v.arm} spikes more than {v.against}",
                (gate.sentence, *worst_layers(material, setup, v.arm)),
                "single batches whose outliers the scales do not follow, or a learning rate at the edge",
                "a recipe with finer scales (rowwise, blockwise), the worst layers in bf16, or gradient clipping",
            )


def _diverged(run: Run, control: Run | None) -> str:
    """How and where a run left its control within the first steps; empty if it did not."""
    if run.broke_at is not None and run.broke_at < EARLY_STEPS:
        return f"is NaN or infinite from step {run.broke_at}"
    if control is None:
        return ""
    count = min(run.loss.steps.size, control.loss.steps.size)
    early = run.loss.steps[:count] < EARLY_STEPS
    mine, theirs = run.loss.values[:count][early], control.loss.values[:count][early]
    if not mine.size or not np.isfinite(mine).all() or not np.isfinite(theirs).all():
        return ""
    steps = run.loss.steps[:count][early]
    gap = verdict.ema(mine - theirs, steps, EARLY_HALF_LIFE, from_zero=True) / theirs
    over = np.flatnonzero(gap > DIVERGED)
    if not over.size:
        return ""
    return f"is {100 * gap.max():.0f} % above {CONTROL} (first beyond {100 * DIVERGED:.0f} % at step {int(steps[over[0]])})"
