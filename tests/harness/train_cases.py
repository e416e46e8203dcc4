"""Cases of the suite `train` that take a moment, run and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness import store
from harness.engine.bench import Setting
from harness.engine.executor import run
from harness.engine.plan import make_plan
from harness.engine.settings import SweepConfig
from harness.store.case import Case
from harness.suites import divergence, train
from harness.timing.rounds import TimingConfig

if TYPE_CHECKING:
    from harness.engine.arms import TimeLimits

QUICK = TimingConfig(
    min_rounds=3,
    max_rounds=3,
    min_samples=3,
    min_seconds=0.0,
    block_ms=0.0,
    warmup_min_iterations=1,
    warmup_min_seconds=0.0,
    warmup_max_seconds=0.1,
)
SMALL = {"compute": "fp32", "batch": 2, "seq": 16}


def case(**changes: Any) -> Case:
    axes = {**SMALL, **changes}
    return Case.of("train", train.points([], {k: [v] for k, v in axes.items()}, None)[0] | axes)


def divergence_case(**changes: Any) -> Case:
    """A short run of the suite `divergence`."""
    axes = {
        "steps": 10,
        "batch": 4,
        "seq": 16,
        "eval_every": 5,
        "eval_batches": 1,
        "diagnose_every": 5,
        **changes,
    }
    return Case.of("divergence", divergence.points([], {k: [v] for k, v in axes.items()}, None)[0] | axes)


def execute(
    folder: Path,
    arms: list[str],
    *,
    timing: TimingConfig = QUICK,
    control: bool = False,
    limits: TimeLimits | None = None,
    **axes: Any,
) -> pd.DataFrame:
    config: dict[str, Any] = {
        "name": "train", "suite": "train", "axes": {**SMALL, **axes}, "shapes": [], "arms": arms, "parts": {},
        "model": None, "seed": 0, "device": "cpu",
    }  # fmt: skip
    plan = make_plan(SweepConfig.of(config), {"train": train})
    writer = store.RunWriter(folder, run_id="r", sweep="train", env_id="e", env={}, about={})
    setting = Setting("cpu", timing, control=control, folder=folder)
    writer.close(run(plan, writer, setting, limits=limits).state)
    return store.read(folder)


def row(frame: pd.DataFrame, arm: str, metric: str = "time_ms") -> dict[str, Any]:
    (found,) = frame[(frame["arm"] == arm) & (frame["metric"] == metric)].to_dict("records")
    return found | {"resolved": json.loads(found["resolved"])}
