"""Runs of the toy trial suite through the executor, and the curves that they must store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from toy import as_module, planned
from toy_trials import STEPS, ToyTrials

from harness import store
from harness.engine.arm_process import Conditions
from harness.engine.bench import Setting
from harness.engine.executor import Place, RunOutcome, run
from harness.engine.resume import stored_arms, stored_cases
from harness.timing.rounds import TimingConfig

if TYPE_CHECKING:
    from harness.engine.plan import SweepPlan

ARMS = ("base", "tensorwise", "rowwise", "broken")


def plan(suite: ToyTrials, seeds: int = 2) -> SweepPlan:
    return planned(as_module(suite), {"seed": list(range(seeds))})


def writer(folder: Path) -> store.RunWriter:
    return store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})


def execute(
    folder: Path, suite: ToyTrials, *, seeds: int = 2, resume: bool = False, lanes: int = 0, **changes: Any
) -> tuple[RunOutcome, pd.DataFrame]:
    made = plan(suite, seeds)
    done = stored_cases(folder, made) if resume else set()
    done_arms = stored_arms(folder, made, done) if resume else set()
    into = writer(folder)
    places = [Place(Conditions.here())] if lanes else []  # none: all in this process
    setting = Setting(changes.pop("device", "cpu"), TimingConfig())
    given = {"places": places, "lanes": lanes} | changes
    outcome = run(made, into, setting, done=done, done_arms=done_arms, **given)
    into.close(outcome.state)
    return outcome, store.read(folder)


def curves(frame: pd.DataFrame) -> dict[tuple[int, str], list[float]]:
    """Losses of successful runs: (seed, arm) -> loss."""
    good = frame[(frame["metric"] == "loss") & (frame["status"] == "ok")]
    return {
        (json.loads(row.axes)["seed"], row.arm): list(row.samples) for row in good.itertuples(index=False)
    }


WHOLE = {(seed, arm): [float(seed)] * STEPS for seed in (0, 1) for arm in ARMS}
