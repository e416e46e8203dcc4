"""Suite `parallel`: does every way of training in parallel give, with every recipe, the losses of one process?

A case is one way (`harness.training.parallel.cells`), an arm one recipe; each is a launch of ranks and some training steps of a
small Llama. What comes of it is one of

    ok        it ran, and its losses lie within a stated bound of the single process's (`harness.training.parallel.cells`)
    skipped   "refuses: ..." what fp8core said when the model was converted and wrapped; or what this machine lacks
    failed    it ran otherwise than one process does, a rank raised, died or hung

A recipe that this device has no kernel for is emulated: what is compared here is not speed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fp8core import RECIPES
from harness.machine import ranks
from harness.store.case import Arm
from harness.store.errors import Cause
from harness.suites import axes_of
from harness.suites.common import compile_missing, crossed_points, recipe_unsupported
from harness.suites.extended import extended_table
from harness.timing.workload import ArmInfo, Series, TrialOutcome, Unsupported
from harness.training.parallel import cells
from harness.training.parallel.cells import CELLS, ParallelCell
from harness.training.parallel.job import BATCH, SEQ, ParallelRun, deviation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.store.case import Case

BASE = "no_fp8"

AXES = axes_of("parallel", cell={name: cell.doc for name, cell in CELLS.items()})
ARMS: Mapping[str, ArmInfo] = extended_table(
    {
        Arm(BASE): ArmInfo("float32, no FP8"),
        **{Arm(name): ArmInfo(f"recipe {name}", BASE, name) for name in RECIPES},
    },
    RECIPES,
)


points = crossed_points("parallel", "a model of its own", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Too few GPUs, or no compiler where one is needed."""
    cell = _cell(case)
    if missing := ranks.gpus_missing(cell.world, device):
        return Unsupported("device", missing)
    # On a CPU blocks are traced and not compiled, which takes no compiler
    return compile_missing(device) if cell.compiled and device == "cuda" else None


def world(case: Case) -> int:
    """Ranks."""
    return _cell(case).world


def work(case: Case) -> float:
    """Tokens of a run."""
    return float(_cell(case).microbatches * BATCH * SEQ * case.integer("steps"))


def trial(
    case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]
) -> TrialOutcome:
    """Trains in ranks and alone, and compares."""
    name, cell, job = case.text("cell"), _cell(case), job_of(case, arm, device)
    resolved: dict[str, object] = {
        "doc": cell.doc,
        "world": cell.world,
        "hosts": ranks.hosts(),
        "recipe": str(job.recipe) if job.recipe else "none",
        "compute": "fp32",
        "optimizer": "SGD",
        "tokens_per_step": cell.microbatches * BATCH * SEQ,
    }
    if job.recipe is not None and job.recipe is not RECIPES[arm]:
        resolved["emulated"] = _lacking(arm, device)
    every = cells.everywhere(name, job)
    if not every:  # another rank, for which rank 0 speaks
        return TrialOutcome((), resolved)
    resolved |= every[0].facts
    if every[0].refusal:
        return TrialOutcome((), resolved, refusal=every[0].refusal)
    if fault := not_finite([ran.losses for ran in every]):
        return TrialOutcome((), resolved, fault, cause=Cause.DIVERGED)
    losses = _mean([ran.losses for ran in every])
    reference = cell.reference(job)
    expected = cells.reference(reference)
    bound, source = cell.bound(reference)
    apart = deviation(losses, expected)
    resolved |= {"reference": list(expected), "bound": bound, "bound_from": source, "loss_deviation": apart}
    steps = tuple(range(len(losses)))
    on_step(len(losses), len(losses))
    if not apart <= bound:  # also where the one process's loss is NaN
        why = f"losses {_losses_text(losses)} differ from one process's {_losses_text(expected)} by {apart:.2e}; bound {bound:.2e} ({source})"
        return TrialOutcome((), resolved, why, cause=Cause.NUMERICS)
    sent: Mapping[str, float] = every[0].facts.get("sent_bytes_per_step", {})
    return TrialOutcome(
        (
            Series("loss", losses, steps),
            Series("loss_deviation", (apart,), steps[-1:]),
            *(Series("wire_bytes", (size,), (0,), part) for part, size in sent.items()),
        ),
        resolved,
    )


def job_of(case: Case, arm: str, device: str) -> ParallelRun:
    """What an arm of a case trains, before the cell adds its own."""
    recipe = None if arm == BASE else RECIPES[arm]
    if recipe is not None and _lacking(arm, device):
        recipe = recipe.emulated()
    return ParallelRun(recipe, steps=case.integer("steps"), seed=case.seed, device=device)


def not_finite(curves: Sequence[Sequence[float]]) -> str:
    """Which rank's loss was the first that is no finite number, and when; "" where all are.

    A gradient carries it to all ranks within a step, so only the first tells where it came from. A rank that knows of
    no loss (a stage of a pipeline) has an empty curve.
    """
    first = {
        rank: next((step for step, loss in enumerate(curve) if not math.isfinite(loss)), len(curve))
        for rank, curve in enumerate(curves)
        if curve
    }
    start = min(first.values())
    guilty = [rank for rank, step in first.items() if step == start]
    if start == len(curves[guilty[0]]):
        return ""
    named = f"rank {guilty[0]}" if len(guilty) == 1 else f"ranks {', '.join(map(str, guilty))}"
    others = "; the others' is finite there" if len(guilty) < len(first) else ""
    return f"{named} of {len(curves)}: loss is {curves[guilty[0]][start]} at step {start}{others}"


def _cell(case: Case) -> ParallelCell:
    return CELLS[case.text("cell")]


def _lacking(arm: str, device: str) -> str:
    """Why this device can't run a recipe as it is; "" if it can."""
    why = recipe_unsupported(RECIPES[arm], BATCH * SEQ, device)
    return why.reason if why is not None else ""


def _mean(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """By step, over the ranks that know a loss."""
    return tuple(sum(losses) / len(losses) for losses in zip(*filter(None, curves), strict=True))


def _losses_text(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
