"""Training runs that take a moment, and what of them must repeat."""

from __future__ import annotations

from typing import Any

import torch
from tiny_lm import TinyLM, tokens

from fp8core import RECIPES, PrecisionSchedule
from harness.training.loop import TrainingJob, TrainingRegime, TrainingResult
from harness.training.setup import Setup

STEPS = 12


def job(recipe: str = "delayed", schedule: str = "", **changes: Any) -> TrainingJob:
    """A run of a small model with dropout, two microbatches a step and delayed scaling."""
    torch.manual_seed(3)
    regime = {"steps": STEPS, "lr": 1e-2, "min_lr": 1e-3, "warmup": 3, "eval_every": 4, "checkpoint_s": 0.0}
    setup = {"compute": "fp32", "accumulation": 2, "recipe": RECIPES[recipe] if recipe else None}
    given: dict[str, Any] = {
        "setup": Setup("tiny", 4, 8, **(setup | changes.pop("setup", {}))),
        "regime": TrainingRegime(**(regime | changes.pop("regime", {}))),
        "heldout": [tokens(10**6 + i) for i in range(2)],
        "schedule": PrecisionSchedule.parse(schedule),
        "identity": "a run",
        "model": TinyLM(dropout=0.1),
    }
    given |= changes
    count = given["setup"].accumulation
    given["batches"] = lambda step: [tokens(step * count + i) for i in range(count)]
    return TrainingJob(**given)


def curves(result: TrainingResult, looked_at: bool = True) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """What must repeat: everything but the clock, and the training alone if asked."""
    points = {key: list(p) for key, p in result.curves.points.items() if key[0] != "elapsed_s"}
    return points if looked_at else {key: points[key] for key in (("loss", ""), ("grad_norm", ""))}
