"""Instability: training runs whose loss leaves their control's early, or spikes more; findings of `harness.judge.diagnosis`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.judge.diagnosis import Finding, setting_of
from harness.judge.verdict import ema
from harness.judge.verdict.rows import CONTROL, setups
from harness.store.case import NEGATIVE, WARMUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.judge.diagnosis import DiagnosisInput
    from harness.judge.verdict import Run
    from harness.judge.verdict.rows import StoredSetup

EARLY_STEPS = 50
DIVERGED = 0.10  # smoothed gap, of the control's loss
EARLY_HALF_LIFE = 5.0
RISEN = 0.5  # of the smoothed loss above its first value: single batches differ by less
# AdamW moves each weight by about the learning rate in a step, and weights begin at about 0.02; published rates are 1e-5 to 1e-2
ABSURD_RATE = 0.1


def found(material: DiagnosisInput) -> Iterator[Finding]:
    """The findings of the training runs in the rows."""
    trainings = setups(material.frame)
    yield from _early_divergence(material, trainings)
    yield from _loss_spikes(material, trainings)


def _early_divergence(material: DiagnosisInput, trainings: Sequence[StoredSetup]) -> Iterator[Finding]:
    """A loss that leaves its control's within the first 50 steps, with LR, warm-up and the worst layer.

    Where the control breaks in the same seeds, FP8 is not the cause: one finding for all arms, and no schedule proposed.
    """
    for setup in trainings:
        base = setup.arms.get(CONTROL, {})
        failing = {s: where for s, run in base.items() if (where := _runs_away(run))}
        with_control = []
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
                with_control.append(arm)
            elif seen:
                yield _of_fp8(material, setup, arm, seen)
        if with_control:
            shown, smaller, absurd = _learning_rate(setup, with_control[0])
            yield Finding(
                f"{CONTROL} diverges within the first {EARLY_STEPS} steps, and {', '.join(with_control)} with it",
                (_seeds(failing, base), shown),
                absurd
                or "the learning rate is too high for this set-up, or its warm-up too short: FP8 has no part in it",
                f"{smaller} or a longer warm-up (axes.lr_warmup), until {CONTROL} trains",
            )


def _of_fp8(material: DiagnosisInput, setup: StoredSetup, arm: str, seen: Mapping[int, str]) -> Finding:
    """The control trains, and this arm does not."""
    runs = setup.arms[arm]
    shown, smaller, absurd = _learning_rate(setup, arm)
    ways = f"{smaller} or a longer warm-up (axes.lr_warmup)"
    if max(run.planned_steps or run.loss.steps.size for run in runs.values()) > 4 * EARLY_STEPS:
        ways += f" or schedule=warmup_bf16:{2 * EARLY_STEPS}, which starts FP8 after the worst is over"
    cause = f"not known: {CONTROL} was not run in these seeds"
    if seen.keys() <= setup.arms.get(CONTROL, {}).keys():
        cause = f"what it computes otherwise than {CONTROL}, which trains on the same batches at the same learning rate"
    evidence = (_seeds(seen, runs), shown, *_worst_layers(material, setup, arm))
    return Finding(f"{arm} diverges within the first {EARLY_STEPS} steps", evidence, absurd or cause, ways)


def _seeds(seen: Mapping[int, str], runs: Mapping[int, Run]) -> str:
    return f"{len(seen)} of {len(runs)} seeds: " + "; ".join(f"seed {s} {where}" for s, where in seen.items())


def _learning_rate(setup: StoredSetup, arm: str) -> tuple[str, str, str]:
    """The learning rate and its warm-up in words, a smaller one to try, and "" or why no model survives it."""
    schedule = setup.fact(arm, "lr_schedule")
    schedule = schedule if isinstance(schedule, dict) else {}
    rate, rise = setup.axes.get("lr", schedule.get("lr")), schedule.get("rise_steps")
    rising = "of unknown length" if rise is None else f"{rise} steps"
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        return f"learning rate not known, warm-up {rising}", "a smaller lr", ""
    shown = f"learning rate {rate:g}, warm-up {rising}"
    if rate < ABSURD_RATE:
        return shown, f"axes.lr={rate / 2:g}", ""
    why = f"the learning rate {rate:g}: AdamW moves each weight by about that much in a step, and weights begin at about 0.02"
    return shown, "axes.lr=0.001 or less", why


def _runs_away(run: Run) -> str:
    """How and where a run breaks by itself within its first steps; empty if it does not."""
    if run.broke_at is not None and run.broke_at < EARLY_STEPS:
        return f"is NaN or infinite from step {run.broke_at}"
    early = run.loss.steps < EARLY_STEPS
    steps, values = run.loss.steps[early], run.loss.values[early]
    if values.size < 2 * EARLY_HALF_LIFE or not np.isfinite(values).all():
        return ""
    end = float(ema(values, steps, EARLY_HALF_LIFE)[-1])
    if end <= (1 + RISEN) * values[0]:
        return ""
    return f"ends step {int(steps[-1])} at {end:.3g}, above the {values[0]:.3g} that it began with"


def _diverged(run: Run, control: Run | None) -> str:
    """How and where a run left its control within the first steps; empty if it did not."""
    if control is None:
        return ""
    count = min(run.loss.steps.size, control.loss.steps.size)
    early = np.flatnonzero(run.loss.steps[:count] < EARLY_STEPS)
    steps, mine, theirs = run.loss.steps[early], run.loss.values[early], control.loss.values[early]
    if not mine.size or not np.isfinite([mine, theirs]).all():
        return ""
    gap = ema(mine - theirs, steps, EARLY_HALF_LIFE, from_zero=True) / theirs
    over = steps[gap > DIVERGED]
    if not over.size:
        return ""
    return f"is {100 * gap.max():.0f} % above {CONTROL} (first beyond {100 * DIVERGED:.0f} % at step {int(over[0])})"


def _worst_layers(material: DiagnosisInput, setup: StoredSetup, arm: str) -> list[str]:
    """The tensor with the most saturation and the one with the most underflow, where the run was diagnosed."""
    sampled = [r for r in material.rows.pick(part=bool, arm=arm) if setting_of(r) == setup.axes]
    lines, looked = [], []
    for metric, word in (("saturated_frac", "saturation"), ("underflow_frac", "underflow")):
        shares = [
            (max(r["samples"]), r["part"]) for r in sampled if r["metric"] == metric and len(r["samples"])
        ]
        share, part = max(shares, default=(0.0, ""))
        looked.append(bool(shares))
        if share > 0:
            lines.append(f"most {word}: {part}, {100 * share:.3g} %")
    return lines or [
        "no cast saturates or underflows" if all(looked) else "layers were not diagnosed in this run"
    ]


def _loss_spikes(material: DiagnosisInput, trainings: Sequence[StoredSetup]) -> Iterator[Finding]:
    """More loss or gradient spikes than the control has."""
    for v in material.verdicts:
        gate = v.verdict.gate("L2")
        if gate is not None and gate.effect > 0 and v.fields.variant != NEGATIVE:
            setup = next(s for s in trainings if (s.run_id, s.axes, s.env_id) == (v.run_id, v.axes, v.env_id))
            yield Finding(
                f"{v.arm} spikes more than {v.against}",
                (gate.sentence, *_worst_layers(material, setup, v.arm)),
                f"not known: {v.against} saw the same batches, and the rows do not show which casts make the difference",
                "a recipe with finer scales (rowwise, blockwise), the worst layers in bf16, or gradient clipping",
            )
