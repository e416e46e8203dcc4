"""Curves: a loss that leaves its control's at once, and one that spikes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge import verdict
from harness.judge.diagnosis.casts import worst_layers
from harness.judge.diagnosis.finding import Finding
from harness.judge.verdict.rows import CONTROL, NEGATIVE
from harness.store.arm import WARMUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.judge.diagnosis.finding import Material
    from harness.judge.verdict import Run
    from harness.judge.verdict.rows import Setup

EARLY_STEPS = 50
DIVERGED = 0.10  # smoothed gap, of the control's loss
EARLY_HALF_LIFE = 5.0
RISEN = 0.5  # of the smoothed loss above its first value: single batches differ by less
# AdamW moves each weight by about the learning rate in a step, and weights begin at about 0.02; published rates are 1e-5 to 1e-2
ABSURD_RATE = 0.1


def early_divergence(material: Material) -> Iterator[Finding]:
    """A loss that leaves its control's within the first 50 steps, with LR, warm-up and the worst layer.

    Where the control breaks in the same seeds, FP8 is not the cause: one finding for all arms, and no schedule proposed.
    """
    for setup in material.setups:
        base = setup.arms.get(CONTROL, {})
        failing = {s: where for s, run in base.items() if (where := _runs_away(run))}
        with_control: dict[str, dict[int, str]] = {}
        for arm, runs in setup.arms.items():
            fields = setup.records[arm]
            if fields.recipe == CONTROL or fields.variant in (WARMUP, NEGATIVE):
                continue
            seen = {
                s: where
                for s, run in runs.items()
                if (where := _diverged(run, base.get(s)) or _runs_away(run))
            }
            if seen.keys() & failing.keys():
                with_control[arm] = seen
            elif seen:
                yield _of_fp8(material, setup, arm, seen)
        if with_control:
            yield _of_the_regime(setup, failing, list(with_control))


def _of_fp8(material: Material, setup: Setup, arm: str, seen: Mapping[int, str]) -> Finding:
    """The control trains, and this arm does not."""
    runs = setup.arms[arm]
    evidence = (*_where(seen, len(runs)), _rates(setup, arm), *worst_layers(material, setup, arm))
    ways = [_smaller_rate(setup, arm), "a longer warm-up (axes.lr_warmup)"]
    if max(run.planned_steps or run.loss.steps.size for run in runs.values()) > 4 * EARLY_STEPS:
        ways.append(f"schedule=warmup_bf16:{2 * EARLY_STEPS}, which starts FP8 after the worst is over")
    cause = f"not known: {CONTROL} was not run in these seeds"
    if seen.keys() <= setup.arms.get(CONTROL, {}).keys():
        cause = f"what it computes otherwise than {CONTROL}, which trains on the same batches at the same learning rate"
    return Finding(
        f"{arm} diverges within the first {EARLY_STEPS} steps",
        evidence,
        _absurd(setup, arm) or cause,
        " or ".join(ways),
    )


def _of_the_regime(setup: Setup, failing: Mapping[int, str], arms: list[str]) -> Finding:
    """The control breaks too."""
    return Finding(
        f"{CONTROL} diverges within the first {EARLY_STEPS} steps, and {', '.join(arms)} with it",
        (*_where(failing, len(setup.arms[CONTROL])), _rates(setup, arms[0])),
        _absurd(setup, arms[0])
        or "the learning rate is too high for this set-up, or its warm-up too short: FP8 has no part in it",
        f"{_smaller_rate(setup, arms[0])} or a longer warm-up (axes.lr_warmup), until {CONTROL} trains",
    )


def _where(seen: Mapping[int, str], runs: int) -> tuple[str, ...]:
    return (f"{len(seen)} of {runs} seeds: " + "; ".join(f"seed {s} {where}" for s, where in seen.items()),)


def _schedule(setup: Setup, arm: str) -> Mapping[str, Any]:
    found = setup.resolved.get(arm, {}).get("lr_schedule")
    return found if isinstance(found, dict) else {}


def _rate(setup: Setup, arm: str) -> float | None:
    found = setup.axes.get("lr", _schedule(setup, arm).get("lr"))
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _rates(setup: Setup, arm: str) -> str:
    rate, rise = _rate(setup, arm), _schedule(setup, arm).get("rise_steps")
    shown = "not known" if rate is None else f"{rate:g}"
    return f"learning rate {shown}, warm-up {'of unknown length' if rise is None else f'{rise} steps'}"


def _absurd(setup: Setup, arm: str) -> str:
    """A learning rate that no model survives as the cause; empty for others."""
    rate = _rate(setup, arm)
    if rate is None or rate < ABSURD_RATE:
        return ""
    return f"the learning rate {rate:g}: AdamW moves each weight by about that much in a step, and weights begin at about 0.02"


def _smaller_rate(setup: Setup, arm: str) -> str:
    rate = _rate(setup, arm)
    if rate is None:
        return "a smaller lr"
    return "axes.lr=0.001 or less" if rate >= ABSURD_RATE else f"axes.lr={rate / 2:g}"


def loss_spikes(material: Material) -> Iterator[Finding]:
    """More loss or gradient spikes than the control has."""
    for v in material.verdicts:
        gate = v.verdict.gate("L2")
        if gate is not None and gate.effect > 0 and v.arm != NEGATIVE:
            setup = next(s for s in material.setups if (s.run_id, s.axes) == (v.run_id, v.axes))
            yield Finding(
                f"{v.arm} spikes more than {v.against}",
                (gate.sentence, *worst_layers(material, setup, v.arm)),
                f"not known: {v.against} saw the same batches, and the rows do not show which casts make the difference",
                "a recipe with finer scales (rowwise, blockwise), the worst layers in bf16, or gradient clipping",
            )


def _runs_away(run: Run) -> str:
    """How and where a run breaks by itself within its first steps; empty if it does not."""
    if run.broke_at is not None and run.broke_at < EARLY_STEPS:
        return f"is NaN or infinite from step {run.broke_at}"
    early = run.loss.steps < EARLY_STEPS
    steps, values = run.loss.steps[early], run.loss.values[early]
    if values.size < 2 * EARLY_HALF_LIFE or not np.isfinite(values).all():
        return ""
    end = float(verdict.ema(values, steps, EARLY_HALF_LIFE)[-1])
    if end <= (1 + RISEN) * values[0]:
        return ""
    return f"ends step {int(steps[-1])} at {end:.3g}, above the {values[0]:.3g} that it began with"


def _diverged(run: Run, control: Run | None) -> str:
    """How and where a run left its control within the first steps; empty if it did not."""
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
