"""What suite `scale` predicts of the reference job, for the GPUs and ranks that it has; or why nothing is predicted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engine.plan import PlannedCase
from harness.engine.rows import row, trial_rows
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.suites import scale

if TYPE_CHECKING:
    from harness.cli.reference_settings import Settings
    from harness.store.measurement import Measurement
    from harness.timing.workload import Trial


def case_of(settings: Settings, world: int, gpu: str) -> Case:
    """The case of suite `scale` that the job is.

    Gradients are reduced after every forward pass of a step, as the job does (`reduce_each`).

    Args:
        settings: of the job.
        world: its ranks; of a node those that torchrun started here.
        gpu: key of the peak table, or another device's name.
    """
    others = {name: a.choices[0] if a.default is None else a.default for name, a in scale.AXES.items()}
    names = ("model", "batch", "seq", "accumulation", "checkpointing", "weights")
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine: dict[str, Any] = {name: getattr(settings, name) for name in names}
    mine |= {"gpu": gpu, "world": world, "node": node, "reduce": "fp32"}
    return Case.of("scale", others | mine | {"reduce_each": settings.accumulation > 1, "proof": False})


def rows(case: Case, recipe: str, gpu: str) -> list[Measurement]:
    """The prediction of bf16 and of the arms of a recipe; skipped rows with the reason where none can be made.

    Args:
        case: of `case_of`.
        recipe: of the FP8 arm.
        gpu: key of the peak table; "" for a device that is not in it.

    Raises:
        UsageError: no arm is predicted to fit the memory of these GPUs.
    """
    found: list[Measurement] = []
    trials: list[Trial] = []
    for arm, info in scale.ARMS.items():
        if info.recipe not in ("", recipe):
            continue
        planned = PlannedCase("", scale, case, (arm,))
        why, cause = _no_data_sheet(case), Cause.UNSUPPORTED
        if gpu:
            absent = scale.unsupported(case, arm, "cuda")
            why = absent.reason if absent is not None else ""
        if why:
            found.append(row(planned, arm, "skipped", "predicted_step_ms", reason=why, cause=cause))
            continue
        trials.append(scale.trial(case, arm, "cuda", Path(), lambda step, steps: None))
        found += trial_rows(planned, arm, trials[-1])
    if trials and not any(trial.resolved["fits"] for trial in trials):
        _refuse(case, trials[0])
    return found


def _no_data_sheet(case: Case) -> str:
    device = case.text("gpu")
    return (
        f"no prediction for this device: {'a CPU' if device == 'cpu' else 'it'} is not in the table of GPUs"
    )


def _refuse(case: Case, trial: Trial) -> None:
    needed = next(s.samples[0] for s in trial.series if s.metric == "predicted_memory_bytes" and not s.part)
    room: Any = trial.resolved["gpu_memory_bytes"]
    raise UsageError(
        f"{case['world']} GPUs are too few: model {case['model']} is predicted to need {needed / 1e9:.0f} GB of {room / 1e9:.0f} GB on "
        "each; give more nodes (sbatch --nodes=N) or a smaller batch"
    )
