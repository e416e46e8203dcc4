"""Patterns: a precision switched mid-run, and runs of other seeds, which no paired gate can judge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.verdict.result import LATE, MIN_POINTS, MIN_SEEDS, GateResult
from harness.store import stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.judge.verdict.curves import Run


def prefix(candidate: Mapping[int, Run], twin: Mapping[int, Run], named: str) -> GateResult:
    """A precision pattern is bit for bit its base arm until it switches.

    Args:
        candidate: runs that have a `switch_step`.
        twin: runs of the arm that trains all the way as the candidate does until its switch.
        named: what to call that arm.
    """
    shared = sorted(candidate.keys() & twin.keys())
    if not shared:
        return GateResult("prefix", "INCONCLUSIVE", f"no run of {named} to compare the first phase with")
    alone = sorted(candidate.keys() - twin.keys())
    if alone:
        shown = ", ".join(map(str, alone))
        return GateResult("prefix", "INCONCLUSIVE", f"no run of {named} for seed {shown}", seeds=len(shared))
    worst, differing, compared = 0.0, [], 0
    for seed in shared:
        run, other = candidate[seed], twin[seed]
        if run.switch_step is None:
            return GateResult(
                "prefix", "INCONCLUSIVE", f"seed {seed} does not record at which step it switched"
            )
        for mine, theirs in ((run.loss, other.loss), (run.grad_norm, other.grad_norm)):
            if mine is None or theirs is None:
                continue
            a, b = mine.steps < run.switch_step, theirs.steps < run.switch_step
            if not np.array_equal(mine.steps[a], theirs.steps[b]):
                return GateResult(
                    "prefix", "INCONCLUSIVE", f"seed {seed} was logged at other steps than {named}"
                )
            compared += int(a.sum())
            unequal = mine.values[a] != theirs.values[b]
            if unequal.any():
                differing.append(f"seed {seed} at step {int(mine.steps[a][unequal][0])}")
                worst = max(worst, float(np.abs(mine.values[a] - theirs.values[b])[unequal].max()))
    if not compared:
        return GateResult("prefix", "INCONCLUSIVE", "the first phase has no logged step")
    if differing:
        sentence = f"differs from {named} before the switch: {', '.join(differing)}; by up to {worst:.3g}"
        return GateResult("prefix", "FAIL", sentence, effect=worst, seeds=len(shared), margin=0.0)
    sentence = f"bitwise equal to {named} in {compared} values before the switch"
    return GateResult("prefix", "PASS", sentence, effect=0.0, seeds=len(shared), margin=0.0)


def seed_band(other: Mapping[int, Run], control: Mapping[int, Run]) -> GateResult:
    """Runs of other seeds, unpaired: each late loss inside the interval that the control's seeds predict for one more.

    Its level is 99 % for all runs together. This is the wide band: it is some twenty times the paired noise.
    """
    steps = max((r.loss.steps for r in control.values()), key=len, default=np.zeros(0))
    whole = {
        name: [r for r in runs.values() if np.array_equal(r.loss.steps, steps) and r.broke_at is None]
        for name, runs in (("other", other), ("control", control))
    }
    if len(whole["control"]) < MIN_SEEDS or not whole["other"] or steps.size < MIN_POINTS:
        sentence = f"{len(whole['control'])} control runs and {len(whole['other'])} others of {steps.size} steps are too few"
        return GateResult("band", "INCONCLUSIVE", sentence, seeds=len(whole["other"]))
    late = steps >= steps[-1] - LATE * (steps[-1] - steps[0])
    outside, parts, effect, margin = False, [], math.nan, math.nan
    for what, values in (
        ("late", {name: [r.loss.values[late].mean() for r in runs] for name, runs in whole.items()}),
        ("held-out", {name: _finals(runs) for name, runs in whole.items()}),
    ):
        if not all(values.values()):
            continue
        base, mine = np.array(values["control"]), np.array(values["other"])
        confidence = 1 - 0.01 / mine.size
        low, high = stats.prediction_interval(base, confidence)
        outside |= bool((mine < low).any() or (mine > high).any())
        parts.append(f"{what} loss {mine.min():.4f} to {mine.max():.4f} against {low:.4f} to {high:.4f}")
        if what == "late":
            effect, margin = float(mine.mean() / base.mean() - 1), float((high - low) / 2 / base.mean())
    return GateResult(
        "band",
        "FAIL" if outside else "PASS",
        "; ".join(parts),
        effect=effect,
        seeds=len(whole["other"]),
        margin=margin,
        unit="of the loss",
    )


def _finals(runs: Sequence[Run]) -> list[float]:
    """Final held-out losses; none where any run lacks one."""
    ends = [float(r.heldout.values[-1]) for r in runs if r.heldout is not None]
    return ends if len(ends) == len(runs) else []
