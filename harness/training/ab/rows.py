"""A trial's rounds as rows of the store, like those of any sweep."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8core.recipe import RECIPES
from harness.store.case import Arm, Case
from harness.store.errors import Cause
from harness.store.measurement import Measurement
from harness.training.ab.result import AGAIN, ARMS, BASE, FP8
from harness.training.stored import store_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from harness.training.ab.result import TrialPlan, TrialResult

SUITE = "ab"


def measurements(result: TrialResult, plan: TrialPlan, model: str) -> Iterator[Measurement]:
    """One row an arm: its timed steps with their rounds, or why there are none; then its energy, likewise."""
    steps = {"block": plan.block, "lead": plan.lead, "ranks": result.ranks}
    case = Case.of(SUITE, {"model": model, "recipe": result.recipe, **steps}, plan.seed)
    refused = result.doubt if result.refused else ""
    for arm in ARMS:
        is_fp8 = arm == FP8
        flops = dict(result.flops.get(arm if is_fp8 else BASE, {}))
        resolved: dict[str, object] = {
            "timed": "one optimizer step of the user's own loop; of several ranks the slowest one's",
            "recipe": result.recipe if is_fp8 else "bf16",
            "fp8_layers": result.layers if is_fp8 else 0,
            "tokens_per_step": result.tokens,
        }
        if flops:
            # The model's FLOPs; what a loop of the user's own recomputes is not known, so that HFU is not either
            resolved |= {"flops_formula_id": "palm", "checkpointing": "unknown"}
        if is_fp8:
            resolved |= result.facts
            if (extension := RECIPES.owner(result.recipe)) is not None:
                resolved["extensions"] = {extension.package: extension.version}
        named = Arm(result.recipe if is_fp8 else "base", control=arm == AGAIN)
        samples = result.seen("times_ms", arm)
        reason = refused or ("" if samples else "no block of this arm counts")
        cause = Cause.RUN if result.proved else Cause.UNPROVEN if is_fp8 else Cause.BASELINE
        row = Measurement(
            suite=SUITE,
            case_id=case.case_id,
            arm=str(named),
            arm_fields=named,
            axes=case.axes_json,
            seed=case.seed,
            metric="time_ms",
            status="failed" if reason else "ok",
            baseline="" if arm == BASE else BASE,
            regime="isolated",
            resolved=resolved,
            samples=() if reason else tuple(ms for _, ms in samples),
            rounds=() if reason else tuple(index for index, _ in samples),
            reason=reason,
            cause=cause if reason else Cause.NONE,
            flops=flops,
            timing={"method": result.method, "lead_steps": plan.lead, "block_steps": plan.block},
        )
        yield row
        if not reason and arm != AGAIN:
            yield _energy(result, arm, row)


def _energy(result: TrialResult, arm: str, time: Measurement) -> Measurement:
    """Joules per token of an arm, or why there are none."""
    whole = "whole blocks of the user's own loop: an optimizer step with what runs between steps; mean of all ranks' boards"
    resolved = {**time.resolved, "timed": whole}
    row = replace(time, metric="joules_per_token", flops={}, baseline="", timing={}, resolved=resolved)
    read = result.joules.get(arm, ())
    if read and result.tokens:
        rounds, joules = zip(*read, strict=True)
        return replace(row, samples=tuple(j / result.tokens for j in joules), rounds=rounds)
    why = result.unmetered or "a reading of the counter failed"
    if read:
        why = f"{statistics.fmean(j for _, j in read):.4g} J a step, but how many tokens a step has is not known"
    return replace(row, status="skipped", samples=(), rounds=(), reason=why)


def store(result: TrialResult, plan: TrialPlan, model: str, results_dir: str | Path) -> Path:
    """Writes the rows of a trial as a run; returns its folder."""
    about = {
        "made_by": "trial",
        "command": "harness.ab.Trial in a loop of the user's own",
        "question": "FP8 against bf16 in this training loop",
        "answer": [*result.lines(), *_in_lines(result)],
    }
    # Finished also where the trial failed: all rows are there, and each says so
    return store_run(SUITE, model, results_dir, result.device, measurements(result, plan, model), about)


def _in_lines(result: TrialResult) -> Iterator[str]:
    """The figures of a step, which stand nowhere else in the store, a line each arm."""
    for table in result.tables():
        yield table.caption
        for arm, *cells in table.rows:
            known = zip(cells, table.columns[1:], strict=True)
            yield f"{arm.text}: {', '.join(f'{cell.text} {head.title}' for cell, head in known if cell.text)}"
