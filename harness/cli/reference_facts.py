"""What the reference job stores beside its curves: the facts of a training run, what made it, and whether it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.machine import environment
from harness.store.errors import UsageError
from harness.store.json_columns import parse
from harness.training import meta_estimate
from harness.training.loop import facts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from harness.training.loop import TrainingJob

CHANGED = "continued_with_other"  # in `_run.json`


def resolved(
    job: TrainingJob, found: Mapping[str, object], ranks: int, *, compiled: bool
) -> dict[str, object]:
    """Facts of a run for its rows.

    Args:
        job: of one rank.
        found: by the run itself.
        ranks: that trained together.
        compiled: each block, by torch.compile.
    """
    recipe = job.setup.recipe
    return {
        **facts_of(job.setup, job.regime, job.schedule),
        **found,
        "timed": "optimizer steps of all ranks, the wait for the device after each included",
        "ranks": ranks,
        "tokens_per_step": ranks * meta_estimate.tokens(job.setup),
        "compile": "blocks" if compiled else "none",
        "sharding": "FSDP2, each block and the rest",
        "fp8_all_gather": recipe is not None and recipe.fp8_all_gather,
        "flops_formula_id": "palm",
    }


def made_with(device: str) -> dict[str, str]:
    """What the numbers of a run depend on beside its settings: this rank's device, GPU ("" on a CPU), torch and code."""
    return {
        "device": device,
        "GPU": torch.cuda.get_device_name() if device == "cuda" else "",
        "torch": torch.__version__,
        "code of harness and fp8core": str(environment.code_hash(Path(__file__).parents[2])),
    }


def continued_with(about: Mapping[str, Any], mine: dict[str, str], *, anyway: bool) -> dict[str, Any]:
    """What `_run.json` is to say of what makes a run that is begun or continued.

    Args:
        about: what it says so far; empty for a new run.
        mine: of `made_with`.
        anyway: continue though something differs.

    Raises:
        UsageError: the first thing that differs.
    """
    before = about.get("made_with", mine)  # runs of before do not say
    other = {name: [before.get(name), value] for name, value in mine.items() if before.get(name) != value}
    if other and not anyway:
        name, (was, now) = next(iter(other.items()))
        raise UsageError(
            f"the run was made with {name} {was or 'none'}, here it is {now or 'none'}: continue it with the same, take another "
            "run_id, or give resume_anyway=true, which the report then says"
        )
    changes = [*about.get(CHANGED, []), *([other] if other else [])]
    return {"made_with": mine} | ({CHANGED: changes} if changes else {})


def stopped(frame: pd.DataFrame) -> list[str]:
    """A line for each training run of a frame that ended before its last step, since a value was not finite."""
    trained = frame[frame["suite"] == "divergence"].drop_duplicates(["case_id", "arm"])
    whys = (
        (arm, parse(text).get("stopped"))
        for arm, text in zip(trained["arm"], trained["resolved"], strict=True)
    )
    return [f"the training run in {arm} was stopped: {why}" for arm, why in whys if why]
