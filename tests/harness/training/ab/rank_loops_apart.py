"""What the ranks of `test_trial_apart.py` run: ranks that are not in one trial, or leave it before the others."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from loops import Loop
from rank_loops import STEPS, _planted, answer_of

from fp8core import RECIPES, AmaxHistory, convert_to_float8_training
from harness import ab
from harness.training.ab import waits

if TYPE_CHECKING:
    from collections.abc import Iterator


def other_trial(what: str) -> dict[str, Any]:
    """Rank 1 is given another trial; no collective joins the ranks."""
    loop = Loop(seed=0)
    given: dict[str, Any] = {"recipe": "tensorwise", "steps": STEPS, "restore": []}
    if dist.get_rank():
        given |= {
            "seed": {"seed": 1},
            "block": {"block": 1},
            "recipe": {"recipe": "rowwise"},
            "after": {"after": "fp8"},
            "restore": {"restore": [loop.optimizer]},
        }.get(what, {})
        if what == "layers":
            given["after"] = "bf16"  # as rank 0's, which comes unconverted, is left
            convert_to_float8_training(loop.model, module_filter_fn=lambda module, fqn: fqn == "up")
    if what in ("casts", "history"):  # of the same name
        own = RECIPES["delayed"]
        if dist.get_rank():
            changes: dict[str, Any] = {
                "casts": {"grad_input": own.output},
                "history": {"history": AmaxHistory(4)},
            }
            own = replace(own, **changes[what])
        given |= {"recipe": "delayed", "after": "bf16"}
        convert_to_float8_training(loop.model, config=own)
    trial = ab.Trial(loop.model, rank_timeout_s=60.0, **given)
    _planted(trial, 80.0, 100.0)
    loop.run(trial, STEPS)
    return {**answer_of(trial), "turn": loop.turn, "steps_run": trial.result().steps_run}


def leaves(how: str) -> dict[str, Any]:
    """Rank 1 closes the trial, or raises between two steps, while rank 0 goes on."""
    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=STEPS, rank_timeout_s=60.0)
    _planted(trial, 80.0, 100.0)
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


def costly_profiler(block: int) -> dict[str, Any]:
    """On rank 1 the end of each profiled step takes 0.3 s; the loop's own time between steps is equal."""
    real = waits.watched

    @contextlib.contextmanager
    def slow(on_gpu: bool) -> Iterator[list[float]]:
        with real(on_gpu) as own:
            yield own
        time.sleep(0.3 * dist.get_rank())

    loop = Loop(seed=0)
    trial = ab.Trial(loop.model, steps=7 + 9 * (block + 1), block=block)
    with mock.patch("harness.training.ab.waits.watched", slow):
        while not trial.done:
            with trial.step():
                time.sleep(0.02)
                loop.step()
    return {**answer_of(trial), "notes": trial.result().notes}
