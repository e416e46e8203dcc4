"""Training runs for the tests of the verdict and of what is built on it: invented curves, and rows of them.

A control falls from 3.5 to 2.1 nats; a candidate is the control plus a gap. Everything comes from a seeded generator.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from stored import row

from harness.judge.verdict import Curve, Run
from harness.store.case import ABLATIONS, GOLDEN, Case, parse
from harness.store.measurement import FIELD, Measurement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.judge.verdict import Verdict
    from harness.judge.verdict.result import GateResult

STEPS = 300
SEEDS = 5
TOKENS = 512
AXES = {
    "model": "nano",
    "data": "stdlib",
    "batch": 8,
    "seq": 64,
    "steps": STEPS,
    "lr": 1e-3,
    "compute": "fp32",
}


def falling(seed: int, steps: int = STEPS, noise: float = 0.01) -> np.ndarray:
    """Loss of the control of one seed."""
    generator = np.random.default_rng(seed)
    t = np.arange(steps)
    return (
        2.1 + 1.4 * np.exp(-t / (steps / 8)) + generator.normal(0, noise, steps) + generator.normal(0, 0.005)
    )


def control(seeds: Sequence[int] = range(SEEDS), steps: int = STEPS, **more: Any) -> dict[int, Run]:
    """The control's runs by seed."""
    return {s: run_of(falling(s, steps), **more) for s in seeds}


def with_loss(runs: Mapping[int, Run], seed: int, values: Sequence[float], **more: Any) -> dict[int, Run]:
    """The runs with another loss curve for one seed."""
    return {**runs, seed: dataclasses.replace(runs[seed], loss=Curve.of(values), **more)}


def gate(verdict: Verdict, name: str) -> GateResult:
    found = verdict.gate(name)
    assert found is not None
    return found


def shifted(
    base: dict[int, Run],
    gap: float | Callable[[np.ndarray], np.ndarray] = 0.0,
    sd: float = 2e-4,
    ratio: float = 1.0,
) -> dict[int, Run]:
    """A candidate: the control plus a gap in nats (a number or a function of the step), a little noise by seed."""
    out = {}
    for seed, run in base.items():
        generator = np.random.default_rng(1000 + seed)
        added = gap(run.loss.steps) if callable(gap) else np.full(run.loss.steps.size, gap)
        own = generator.normal(0, sd)
        loss = run.loss.values + added + own + generator.normal(0, 5e-4, added.size)
        assert run.heldout is not None
        assert run.grad_norm is not None
        out[seed] = Run(
            Curve(run.loss.steps, loss),
            heldout=Curve(run.heldout.steps, run.heldout.values + added[-1] + own),
            grad_norm=Curve(
                run.grad_norm.steps,
                run.grad_norm.values * ratio * (1 + 1e-9 * generator.random(run.grad_norm.values.size)),
            ),
            elapsed=run.elapsed,
            planned_steps=run.planned_steps,
            tokens_per_step=run.tokens_per_step,
        )
    return out


def run_of(loss: np.ndarray, *, step_s: float = 0.01, evaluations: int = 6, **more: Any) -> Run:
    """A whole run around a loss curve: held-out losses, gradient norms and seconds."""
    at = np.linspace(0, loss.size, evaluations + 1)[1:].astype(int)
    heldout = np.array([loss[max(0, i - 20) : i].mean() for i in at]) + 0.01
    norms = 1.0 + 0.1 * np.random.default_rng(7).random(loss.size) + 1e-9 * np.nan_to_num(loss)
    return Run(
        **{
            "loss": Curve.of(loss),
            "heldout": Curve.of(heldout, at),
            "grad_norm": Curve.of(norms),
            "elapsed": Curve.of(step_s * (1 + np.arange(loss.size))),
            "planned_steps": loss.size,
            "tokens_per_step": TOKENS,
        }
        | more
    )


def outcome_said(line: str) -> str:
    """The outcome of a proof that prints this line."""
    if not line or line.startswith("FP8 verified:"):
        return "proved" * bool(line)
    return "disproved" if line.startswith("FP8 NOT") and "; not checked: " not in line else "unproven"


def rows_of_runs(
    arm: str, runs: dict[int, Run], axes: dict[str, Any] | None = None, **resolved: Any
) -> list[Measurement]:
    """The rows that the suite `divergence` stores for the runs of one arm; an FP8 one is proved, unless `resolved` says otherwise."""
    rows = []
    fields = parse(arm)
    emulated = fields.variant in (GOLDEN, *ABLATIONS)
    if fields.has_fp8:
        resolved = (
            {"emulated": emulated} | ({} if emulated else {"verify": "FP8 verified: 9 of 9"}) | resolved
        )
        resolved = {FIELD: outcome_said(str(resolved.get("verify", ""))), **resolved}
    for seed, run in runs.items():
        case = Case.of("divergence", {**(axes or AXES), "seed": seed})
        said = {"steps": run.planned_steps, "tokens_per_step": run.tokens_per_step, **resolved}
        if run.switch_step is not None:
            said["switch_steps"] = [run.switch_step]
        curves = {
            "loss": run.loss,
            "heldout_loss": run.heldout,
            "grad_norm": run.grad_norm,
            "fp8_grad_norm": run.fp8_grad_norm,
            "elapsed_s": run.elapsed,
        }
        for metric, curve in curves.items():
            if curve is None:
                continue
            stop = curve.steps.size
            if curve.first_nonfinite is not None:  # stored up to there, as the suite does
                stop = int(np.searchsorted(curve.steps, curve.first_nonfinite))
                said = {**said, "nonfinite_step": curve.first_nonfinite, "stopped": "loss is NaN"}
            rows.append(
                row(
                    case,
                    arm,
                    curve.values[:stop].tolist(),
                    metric,
                    baseline="" if arm == "base" else "base",
                    resolved=json.loads(json.dumps(said)),
                    rounds=tuple(int(s) for s in curve.steps[:stop]),
                )
            )
    return rows


def case_of(seed: int = 0) -> Case:
    """The case of one seed of the default set-up."""
    return Case.of("divergence", {**AXES, "seed": seed})


def whole_suite() -> list[Measurement]:
    """All arms of one set-up, each as it should turn out: FP8 passes, the negative control fails."""
    base = control()
    fp8 = shifted(base, lambda t: 0.0007 * np.exp(-t / 80) + 0.0003)
    switch = STEPS // 5
    warm = shifted(base, lambda t: np.where(t < switch, 0.0, 0.0004))
    for seed, run in warm.items():
        same = run.loss.steps < switch
        for mine, theirs in ((run.loss, base[seed].loss), (run.grad_norm, base[seed].grad_norm)):
            mine.values[same] = theirs.values[same]
        warm[seed] = Run(
            run.loss, run.heldout, run.grad_norm, run.elapsed, STEPS, switch, tokens_per_step=TOKENS
        )
    last = STEPS - switch
    cool = {}
    for seed, run in fp8.items():
        loss = run.loss.values.copy()
        loss[last:] -= 0.0002
        cool[seed] = Run(
            Curve.of(loss), run.heldout, run.grad_norm, run.elapsed, STEPS, last, tokens_per_step=TOKENS
        )
    rows = rows_of_runs("base", base)
    rows += rows_of_runs("base_eps", shifted(base, 0.0, sd=1e-5))
    rows += rows_of_runs("base_other", {s: run_of(falling(100 + s)) for s in base})
    rows += rows_of_runs("tensorwise", fp8, recipe="tensorwise")
    rows += rows_of_runs("tensorwise_eps", shifted(fp8, 0.0001))
    rows += rows_of_runs(
        "tensorwise_golden", shifted(base, lambda t: 0.0006 * np.exp(-t / 80) + 0.0003, sd=3e-4)
    )
    rows += rows_of_runs("base_to_tensorwise", warm)
    rows += rows_of_runs("tensorwise_to_base", cool)
    rows += rows_of_runs("negative_control", shifted(base, lambda t: 0.6 * t / (t + 30), ratio=0.6))
    return rows
