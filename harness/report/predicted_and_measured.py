"""Predicted and measured: one training job, its arms as suite `scale` predicted them and as the job itself timed them.

Pairs what one run holds of one arm: the prediction, the block of paired steps (suite `ab`), the training runs (`divergence`).
A suite of which a run holds several cases is not shown, since nothing says which of them is the job; nor is a prediction for
another GPU than the rows are of, or for another model, batch or number of ranks. Seeds of one training run are no cases of their own.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.machine import mfu
from harness.machine.hardware import named, of_env
from harness.report.table import Column, Table, make_table, number, number4, resolved_of
from harness.store import text
from harness.store.arm import arm_of
from harness.store.compare import rows_of
from harness.store.errors import UsageError
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import pandas as pd

    from harness.machine.hardware import Device
    from harness.report.runs import Machine

SUITES = ("scale", "ab", "divergence")
INTRO = (
    "One job: each arm as it was predicted for these GPUs, as it was timed in blocks that alternate with bf16 (A/B block), and as "
    "it trained. Speed is decided by the A/B block alone, since training runs follow one another."
)
# Axes of suite `scale` that say which job it is -> their names in `ab` and `divergence`
_SHARED = {name: name for name in ("model", "batch", "seq", "accumulation", "checkpointing", "weights")} | {
    "world": "ranks"
}
_UNPAIRED = ("base", "bf16")  # the control as suites `ab` and `divergence`, and `scale`, name it


@dataclass(slots=True)
class JobArm:
    """One arm of one job.

    Attributes:
        run_id: of the job.
        name: "bf16", or the recipe with what FSDP2 gathers.
        predicted: milliseconds of a step, tokens/s and mixed MFU of a GPU, bytes of its memory; empty where nothing was.
        no_prediction: why; "" where there is one.
        block_ms, training_ms: median step; None where there is none. Of several seeds the median of all steps.
        block, training: its use of a GPU.
        resumed: steps from which training was continued after a job that had ended.
        left_out: what the run holds and is not shown, with the reason.
    """

    run_id: str
    name: str
    predicted: dict[str, float] = field(default_factory=dict)
    no_prediction: str = ""
    block_ms: float | None = None
    training_ms: float | None = None
    block: mfu.Utilization | None = None
    training: mfu.Utilization | None = None
    resumed: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def job_arms(
    frame: pd.DataFrame,
    device: Device | None,
    known: Collection[str] = (),
    changed: Mapping[str, Collection[str]] | None = None,
) -> list[JobArm]:
    """The arms of the runs that hold a prediction beside what they timed; bf16 first.

    Args:
        frame: rows of the store.
        device: of these rows; None where no peak is known.
        known: runs that are such jobs though their prediction is not among these rows (made on another machine).
        changed: what each run was continued with another of (`changes`). Of a training run that was resumed in such a run
            the steps since it was resumed last are timed alone.
    """
    own = frame[frame["suite"].isin(SUITES)]
    suites = {str(run): set(names) for run, names in own.groupby("run_id")["suite"]}
    timed = {run for run, found in suites.items() if found & {"ab", "divergence"}}
    jobs = [run for run in timed if "scale" in suites[run] or run in known]
    arms: dict[tuple[str, str], JobArm] = {}
    steps: dict[tuple[str, str], list[float]] = {}
    rows = rows_of(own[own["run_id"].isin(jobs)])
    other_jobs = _other_jobs(rows, device)
    cases = _cases(rows, other_jobs)
    for row in rows:
        key = str(row["run_id"]), _name(row)
        arm = arms.setdefault(key, JobArm(*key))
        if other := other_jobs.get((key[0], row["case_id"])):
            arm.no_prediction = arm.no_prediction or other
        elif (count := len(cases[key[0], row["suite"]])) > 1:
            if (why := _several(str(row["suite"]), count)) not in arm.left_out:
                arm.left_out.append(why)
        elif row["suite"] == "scale":
            _predict(arm, row)
        elif row["status"] == "ok" and row["metric"] == "time_ms" and not arm_of(row).control:
            arm.block_ms = float(row["value"])
            arm.block = _use(row, arm.block_ms, 1, device)
        elif row["status"] == "ok" and row["metric"] == "elapsed_s":
            taken = steps.setdefault(key, [])
            taken += _training_steps(arm, row, (changed or {}).get(key[0], ()))
            if taken:
                arm.training_ms = statistics.median(taken)
                ranks = int(resolved_of(row).get("ranks") or 1)
                arm.training = _use(row, arm.training_ms, ranks, device)
    return sorted(arms.values(), key=lambda arm: (arm.run_id, arm.name != "bf16", arm.name))


def _training_steps(arm: JobArm, row: dict[str, Any], changed: Collection[str]) -> list[float]:
    """Milliseconds of each step but the first; of a run that something changed in, those after the first since then."""
    resumed = [int(step) for step in resolved_of(row).get("resumed_from_steps") or ()]
    arm.resumed += resumed
    times = 1e3 * np.diff(np.asarray(row["samples"], np.float64))
    if not resumed or not changed:
        return [float(ms) for ms in times]
    since = [float(ms) for ms, step in zip(times, row["rounds"][1:], strict=True) if step > resumed[-1]]
    what = (
        "no training step is shown: none was timed after" if not since else "training steps are those after"
    )
    why = f"{what} step {resumed[-1]}, where the run was continued with another {', '.join(changed)}"
    if why not in arm.left_out:
        arm.left_out.append(why)
    return since


def changes(about: Mapping[str, Any]) -> list[str]:
    """What a run was continued with another of (`resume_anyway`), by its `_run.json`."""
    return list(dict.fromkeys(name for change in about.get("continued_with_other", ()) for name in change))


def _cases(
    rows: list[dict[str, Any]], other_jobs: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], set[str]]:
    """By run and suite the cases that may be the job, seeds apart."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        known = found.setdefault((str(row["run_id"]), str(row["suite"])), set())
        if (str(row["run_id"]), row["case_id"]) not in other_jobs:
            axes = {name: value for name, value in parse(row["axes"]).items() if name != "seed"}
            known.add(json.dumps(axes, sort_keys=True))
    return found


def _other_jobs(rows: list[dict[str, Any]], device: Device | None) -> dict[tuple[str, str], str]:
    """Predictions, by run and case, that are not of what the run timed on this device, and why."""
    timed: dict[tuple[str, str], set[Any]] = {}
    for row in rows:
        if row["suite"] != "scale":
            for name, value in parse(row["axes"]).items():
                timed.setdefault((str(row["run_id"]), name), set()).add(value)
    found = {}
    for row in rows:
        if row["suite"] == "scale" and row["status"] == "ok":
            run, axes = str(row["run_id"]), parse(row["axes"])
            if why := _other_gpu(str(axes.get("gpu") or ""), device) or _other_axis(run, axes, timed):
                found[run, str(row["case_id"])] = why
    return found


def _other_axis(run: str, axes: Mapping[str, Any], timed: Mapping[tuple[str, str], set[Any]]) -> str:
    for name, there in _SHARED.items():
        values = timed.get((run, there), set())
        if name in axes and values and axes[name] not in values:
            rows = " and ".join(sorted(map(str, values)))
            return f"predicted for {name}={axes[name]}, and the rows are of {there}={rows}"
    return ""


def _other_gpu(gpu: str, device: Device | None) -> str:
    """Why a prediction is not of this device; "" where it is."""
    if device is not None and _known(gpu) is device:
        return ""
    here = device.key if device is not None else "a device that the table of GPUs lacks"
    return f"predicted for {gpu or 'a GPU that is not named'}, and the rows are of {here}"


def _known(gpu: str) -> Device | None:
    try:
        return named(gpu)
    except UsageError:
        return None


def _several(suite: str, count: int) -> str:
    return (
        f"{count} cases of suite {suite} in this run, of which none is shown: nothing says which is this job"
    )


def job_table(machine: Machine) -> Table:
    """A row an arm; columns that no arm has a figure for are left out."""
    known = {run.run_id for run in machine.runs if "made_with" in run.about}  # the reference job's
    changed = {run.run_id: changes(run.about) for run in machine.runs}
    arms = job_arms(machine.frame, machine.device, known, changed)
    records = [_record(arm) for arm in arms]
    several = len({arm.run_id for arm in arms}) > 1
    columns = [
        *([Column("run", "run")] if several else []),
        Column("arm", "arm"),
        *(
            number(title, name, text.percent if name.startswith("mfu") else number4, hint, needs=name)
            for name, (title, hint, _) in _FIGURES.items()
        ),
    ]
    return make_table(f"job-{machine.env_id}", columns, records, _caption(machine, arms))


def _record(arm: JobArm) -> dict[str, Any]:
    figures = {name: of(arm) for name, (_, _, of) in _FIGURES.items()}
    return {"run": arm.run_id, "arm": arm.name} | {n: v for n, v in figures.items() if v is not None}


def lines(
    frame: pd.DataFrame, device: Device | None, changed: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """The same for a terminal, a line an arm."""
    out = []
    for arm in job_arms(frame, device, changed=changed):
        parts = [f"predicted {text.number(arm.predicted['step_ms'], 4)} ms"] if arm.predicted else []
        parts += [f"A/B block {text.number(arm.block_ms, 4)} ms"] if arm.block_ms else []
        if arm.training_ms and arm.training is not None:
            parts.append(f"training {text.number(arm.training_ms, 4)} ms")
            if arm.training.tokens_per_s:
                parts.append(f"{text.number(arm.training.tokens_per_s, 4)} tokens/s a rank")
            share = arm.training.mfu_mixed
            parts.append(
                "no MFU: no peak of this device is known"
                if share is None
                else f"mixed MFU {text.percent(share, 3)}"
            )
        without = [arm.no_prediction] if arm.no_prediction and not arm.predicted else []
        out.append(f"{arm.name}: {', '.join([*parts, *without, *arm.left_out])}")
    return out


def lines_by_machine(frame: pd.DataFrame, about: Mapping[str, Any]) -> list[str]:
    """`lines` of each environment of one job, with the peak of its own GPU; the prediction is that of the job's first start.

    Args:
        frame: rows of the job's run.
        about: its `_run.json`.
    """
    changed = dict.fromkeys(map(str, frame["run_id"].unique()), changes(about))
    timed = frame[frame["suite"].isin({"ab", "divergence"})]
    found = list(timed.groupby("env_id", sort=False)["env"].first().items())
    out = []
    for env_id, env in found:
        facts = parse(env)
        out += [f"On {facts.get('gpu') or facts.get('cpu') or 'an unknown device'} ({env_id}):"] * (
            len(found) > 1
        )
        here = frame[(frame["env_id"] == env_id) | (frame["suite"] == "scale")]
        out += lines(here, of_env(facts), changed)
    return out


def _caption(machine: Machine, arms: list[JobArm]) -> str:
    jobs = [run.about for run in machine.runs if run.run_id in {arm.run_id for arm in arms}]
    where = [
        f"{text.plural(int(about['ranks']), 'rank')} on {', '.join(map(str, about['hosts']))}"
        for about in jobs
        if about.get("ranks") and about.get("hosts")
    ]
    resumed = [
        f"{arm.name}: training was continued from step {', '.join(map(str, arm.resumed))}"
        for arm in arms
        if arm.resumed
    ]
    missing = dict.fromkeys(arm.no_prediction for arm in arms if arm.no_prediction and not arm.predicted)
    left_out = dict.fromkeys(why for arm in arms for why in arm.left_out)
    unknown = [] if machine.device else ["no peak of this device is known, so no MFU is stated"]
    changed = [
        f"the run was continued with {name} {now or 'none'} after {was or 'none'} (resume_anyway)"
        for about in jobs
        for change in about.get("continued_with_other", [])
        for name, (was, now) in change.items()
    ]
    parts = [*dict.fromkeys(where), *missing, *left_out, *unknown, *resumed, *dict.fromkeys(changed)]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


def _name(row: dict[str, Any]) -> str:
    record, resolved = arm_of(row), resolved_of(row)
    if record.recipe in _UNPAIRED:
        return "bf16"
    if row["suite"] == "scale":
        codes = record.recipe != "rowwise" and record.variant != "bf16_gather"
    else:
        codes = bool(resolved.get("fp8_all_gather"))
    return f"{record.recipe}, {'codes' if codes else 'bf16'} gathered"


def _predict(arm: JobArm, row: dict[str, Any]) -> None:
    if row["status"] != "ok":
        arm.no_prediction = str(row["reason"])
    elif row["metric"] == "predicted_step_ms" and not row["part"]:
        resolved = resolved_of(row)
        arm.predicted["step_ms"] = float(row["value"])
        arm.predicted |= {
            name: float(resolved[name]) for name in ("tokens_per_s", "mfu_mixed") if resolved.get(name)
        }
    elif row["metric"] == "predicted_memory_bytes" and not row["part"]:
        arm.predicted["memory_bytes"] = float(row["value"])


def _use(row: dict[str, Any], ms: float, ranks: int, device: Device | None) -> mfu.Utilization | None:
    """Utilization of one rank's device; tokens of a step are all ranks' in the rows of training runs."""
    resolved = resolved_of(row)
    flops = {str(d): float(f) for d, f in parse(row.get("flops")).items() if f}
    tokens = resolved.get("tokens_per_step")
    if not flops:
        return None
    return mfu.utilization(
        flops, ms / 1e3, device, formula="palm", tokens=float(tokens) / ranks if tokens else None
    )


def _of(use: mfu.Utilization | None, name: str) -> float | None:
    return None if use is None else getattr(use, name)


def _giga(size: float | None) -> float | None:
    return None if size is None else size / 1e9


# name -> heading, hint, figure of an arm
_FIGURES: dict[str, tuple[str, str, Callable[[JobArm], float | None]]] = {
    "step_predicted": ("step predicted (ms)", "", lambda arm: arm.predicted.get("step_ms")),
    "step_block": ("step in the A/B block (ms)", "median, paired with bf16", lambda arm: arm.block_ms),
    "step_training": ("step in training (ms)", "median of the training runs", lambda arm: arm.training_ms),
    "tokens_predicted": ("tokens/s predicted", "of a rank", lambda arm: arm.predicted.get("tokens_per_s")),
    "tokens_training": ("tokens/s in training", "of a rank", lambda arm: _of(arm.training, "tokens_per_s")),
    "mfu_predicted": (
        "MFU predicted",
        "mixed, FLOPs as PaLM counts them",
        lambda arm: arm.predicted.get("mfu_mixed"),
    ),
    "mfu_block": ("MFU in the A/B block", "mixed", lambda arm: _of(arm.block, "mfu_mixed")),
    "mfu_training": ("MFU in training", "mixed", lambda arm: _of(arm.training, "mfu_mixed")),
    "memory_predicted": (
        "memory predicted (GB)",
        "of one GPU; 1e9 bytes",
        lambda arm: _giga(arm.predicted.get("memory_bytes")),
    ),
}
