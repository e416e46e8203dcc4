"""A trial's rounds as rows of the store, like those of any sweep."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8core.recipe import RECIPES
from harness.machine import environment
from harness.store import RunWriter, new_run_id
from harness.store.arm import Arm
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.measurement import Measurement
from harness.training.ab.plan import AGAIN, BASE, FP8, GATHER

if TYPE_CHECKING:
    from harness.training.ab.plan import Plan
    from harness.training.ab.result import TrialResult

SUITE = "ab"


def measurements(result: TrialResult, plan: Plan, model: str) -> list[Measurement]:
    """One row an arm: its timed steps with their rounds, or why there are none."""
    case = Case.of(
        SUITE,
        {
            "model": model,
            "recipe": result.recipe,
            "block": plan.block,
            "lead": plan.lead,
            "ranks": result.ranks,
        },
        plan.seed,
    )
    out = []
    for arm in result.arms:
        samples = [(t, r.index) for r in result.rounds if r.has(arm) for t in r.times_ms[arm]]
        is_fp8 = arm in (FP8, GATHER)
        flops = dict(result.flops.get(arm if is_fp8 else BASE, {}))
        resolved: dict[str, object] = {
            "timed": "one optimizer step of the user's own loop; of several ranks the slowest one's",
            "recipe": result.recipe if is_fp8 else "bf16",
            "fp8_layers": result.layers if is_fp8 else 0,
            "tokens_per_step": result.tokens,
            # The model's FLOPs; what a loop of the user's own recomputes is not known, so that HFU is not either
            **({"flops_formula_id": "palm", "checkpointing": "unknown"} if flops else {}),
            **(result.facts.get(arm, {}) if is_fp8 else {}),
        }
        if is_fp8 and (extension := RECIPES.owner(result.recipe)) is not None:
            resolved["extensions"] = {extension.package: extension.version}
        if GATHER in result.arms and is_fp8:
            resolved["fp8_all_gather"] = arm == GATHER
        refused = result.doubt if result.refused else ""
        row = Measurement(
            suite=SUITE,
            case_id=case.case_id,
            arm=str(_record(arm, result.recipe)),
            arm_fields=_record(arm, result.recipe),
            axes=case.axes_json,
            seed=case.seed,
            metric="time_ms",
            status="ok",
            baseline="" if arm == BASE else BASE,
            regime="isolated",
            resolved=resolved,
            samples=tuple(t for t, _ in samples) or (1.0,),
            rounds=tuple(r for _, r in samples) or (0,),
            flops=flops,
            timing={"method": result.method, "lead_steps": plan.lead, "block_steps": plan.block},
        )
        if refused or not samples:
            why = refused or "no block of this arm counts"
            cause = Cause.RUN if result.proved else Cause.UNPROVEN if is_fp8 else Cause.BASELINE
            row = replace(row, status="failed", samples=(), rounds=(), reason=why, cause=cause)
        out.append(row)
        if row.status == "ok" and arm != AGAIN:
            out.append(_energy(result, arm, row))
    return out


def _record(arm: str, recipe: str) -> Arm:
    """An arm of a trial as the store names it."""
    if arm == GATHER:
        return Arm(recipe, variant="fp8_gather")
    return Arm(recipe) if arm == FP8 else Arm("base", control=arm == AGAIN)


def _energy(result: TrialResult, arm: str, time: Measurement) -> Measurement:
    """Joules per token of an arm, or why there are none."""
    whole = "whole blocks of the user's own loop: an optimizer step with what runs between steps; mean of all ranks' boards"
    energy = replace(
        time,
        metric="joules_per_token",
        flops={},
        baseline="",
        timing={},
        resolved={**time.resolved, "timed": whole},
    )
    why = "" if result.joules.get(arm) else result.unmetered or "a reading of the counter failed"
    if not why and not result.tokens:
        why = f"{statistics.fmean(j for _, j in result.joules[arm]):.4g} J a step, but how many tokens a step has is not known"
    if why or result.tokens is None:
        return replace(energy, status="skipped", samples=(), rounds=(), reason=why)
    rounds, joules = zip(*result.joules[arm], strict=True)
    return replace(energy, samples=tuple(j / result.tokens for j in joules), rounds=rounds)


def store(result: TrialResult, plan: Plan, model: str, results_dir: str | Path, is_writer: bool) -> Path:
    """Writes the rows of a trial as a run, on one rank; returns its folder, "" where another rank wrote it."""
    if not is_writer:
        return Path()
    facts = environment.fingerprint(result.device)
    run_id = new_run_id(facts.get("git_commit"))
    folder = Path(results_dir) / SUITE / run_id
    writer = RunWriter(
        folder,
        run_id=run_id,
        sweep=SUITE,
        env_id=environment.env_id(facts),
        env=facts,
        about={
            "made_by": "trial",
            "command": "harness.ab.Trial in a loop of the user's own",
            "question": "FP8 against bf16 in this training loop",
            "answer": result.lines(),
        },
    )
    writer.append(measurements(result, plan, model))
    writer.close("finished")  # all rows are there; that the trial failed is said in each
    return folder
