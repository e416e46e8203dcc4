"""What the ranks of `test_trial_apart.py` run: ranks that are not in one trial, or leave it before the others."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from loops import Loop, planted
from rank_loops import STEPS, answer_of

from fp8core import RECIPES, convert_to_float8_training
from harness import ab

if TYPE_CHECKING:
    pass


def other_trial(what: str) -> dict[str, Any]:
    """Rank 1 is given another trial; no collective joins the ranks."""
    loop = Loop(seed=0)
    given: dict[str, Any] = {"recipe": "tensorwise", "steps": STEPS, "restore": []}
    if dist.get_rank():
        given |= {
            "seed": {"seed": 1},
            "restore": {"restore": [loop.optimizer]},
        }.get(what, {})
        if what == "layers":
            given["after"] = "bf16"  # as rank 0's, which comes unconverted, is left
            convert_to_float8_training(loop.model, module_filter_fn=lambda module, fqn: fqn == "up")
    if what == "casts":  # of a recipe of the same name
        own = RECIPES["delayed"]
        if dist.get_rank():
            own = replace(own, grad_input=own.output)
        given |= {"recipe": "delayed", "after": "bf16"}
        convert_to_float8_training(loop.model, config=own)
    trial = ab.Trial(loop.model, rank_timeout_s=60.0, **given)
    planted(trial)
    loop.run(trial, STEPS)
    return {**answer_of(trial), "turn": loop.turn, "steps_run": trial.result().steps_run}


def leaves(how: str) -> dict[str, Any]:
    """Rank 1 closes the trial, or raises between two steps, while rank 0 goes on."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS, rank_timeout_s=60.0)
    planted(trial)
    began = time.monotonic()
    with contextlib.suppress(ZeroDivisionError), trial:
        while not trial.done and loop.turn < STEPS:
            if dist.get_rank() == 1 and loop.turn == 20:
                if how == "raises":
                    raise ZeroDivisionError("planted")
                trial.close()
                break
            with trial.step():
                loop.step()
    return {**answer_of(trial), "took_s": time.monotonic() - began}


def cannot_begin() -> dict[str, Any]:
    """Rank 1 cannot begin: something is wrong at its first step alone."""
    loop = Loop(seed=0)
    trial: Any = ab.Trial(loop.model, steps=STEPS, rank_timeout_s=60.0)
    raised = ""
    broken = mock.patch("harness.training.ab.trial.Meter", side_effect=RuntimeError("planted"))
    with broken if dist.get_rank() else contextlib.nullcontext():
        try:
            loop.run(trial, STEPS)
        except RuntimeError as error:
            raised = str(error)
    return {**answer_of(trial), "raised": raised, "hooks": len(loop.model._forward_hooks)}
