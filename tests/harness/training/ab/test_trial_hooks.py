"""Trials whose steps hooks of a framework begin and end. Oracles: the same trial by `step()`; the run without a trial, bit for bit;
the faults that are planted.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import rank_loops
import torch
from loops import Loop, equal, planted
from torch import nn

from harness import ab
from harness.machine import ranks
from harness.store.errors import UsageError

SHORT: dict[str, Any] = {"steps": 52}


def test_hooks_around_a_step_are_as_good_as_with() -> None:
    """Oracle: `step()`, on the same batches: equal weights, equal answer."""
    by_with, by_hooks = Loop(), Loop()
    expected = by_with.run(planted(ab.Trial(by_with.model, **SHORT)))
    trial = planted(ab.Trial(by_hooks.model, **SHORT))
    while not trial.done:
        trial.begin_step()
        by_hooks.step()
        trial.end_step()
    assert trial.result() == expected
    assert trial.result().effect.speedup == pytest.approx(1.25)
    assert equal(by_hooks.state(), by_with.state())


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    )


@pytest.mark.parametrize("at", [2, 5, 20])
def test_an_exception_between_the_hooks_restores_by_with_trial(at: int) -> None:
    """`at`: a step that counts bf16's GEMMs, one of the proof, a timed one."""
    loop = Loop()
    before = copy.deepcopy(loop.state())
    plain = hooks_of(loop.model)
    trial = ab.Trial(loop.model, restore=[loop.optimizer, loop.scheduler], **SHORT)

    def run() -> None:
        for i in range(52):
            trial.begin_step()
            loop.step()
            if i == at:
                raise KeyboardInterrupt
            trial.end_step()

    with pytest.raises(KeyboardInterrupt), trial:
        run()
    assert trial.done
    assert "raised KeyboardInterrupt" in trial.result().problem
    assert trial.result().problem.startswith("a step in ")
    assert equal(loop.state(), before)
    assert hooks_of(loop.model) == plain  # what watched the step is gone
    assert torch.overrides._get_current_function_mode_stack() == []
    trial.end_step()  # a framework that calls it late: nothing


@pytest.mark.parametrize("end", ["report", "with", "begin_step"])
def test_a_step_that_no_hook_ended_counts_for_nothing(end: str) -> None:
    """Another callback may stop an epoch between microbatches."""
    loop = Loop()
    before = copy.deepcopy(list(loop.model.parameters()))
    trial = ab.Trial(loop.model, restore=[], **SHORT)
    trial.begin_step()
    loop.step()
    if end == "with":
        with trial:
            pass
    else:
        getattr(trial, end)()
    assert trial.done
    assert "left before its end" in trial.result().problem
    assert equal(list(loop.model.parameters()), before)


def test_batches_that_a_hook_tells_are_added_up() -> None:
    """Microbatches come one by one; the model is not the module that is called."""
    loop = Loop()
    trial = planted(ab.Trial(nn.ModuleDict({"inner": loop.model}), **SHORT))
    while not trial.done:
        trial.begin_step()
        for _ in range(2):
            batch = loop.batch() if loop.turn != 20 else loop.batch()[:8]
            trial.add_batch(batch)
            loop.step(batch)
        trial.end_step()
    faults = [why for r in trial.result().rounds for why in r.faults.values()]
    assert len(faults) == 1
    assert "16x32, 16x32" in faults[0]
    assert "8x32" in faults[0]


def test_ranks_that_meet_after_the_trial_was_made_are_one_trial() -> None:
    """Lightning and accelerate may form the process group when training begins. Oracle: the slower rank's planted time."""
    for answer in ranks.run(rank_loops.made_before_the_group, 2):
        assert answer["proved"], answer["proof"]
        assert answer["base_ms"] == pytest.approx(120.0)
        assert "the slowest of 2 ranks" in answer["text"]


def test_a_trial_that_demands_fp8_all_gather_converts_for_it() -> None:
    for answer in ranks.run(rank_loops.converted_and_sharded, 2, "tensorwise"):
        assert answer["proved"], answer["proof"]
        assert "gathered in FP8" in answer["proof"]
        assert answer["rounds"] == 3


@pytest.mark.parametrize(
    ("name", "library"), [("hugging_face_callback", "transformers"), ("lightning_callback", "lightning")]
)
def test_bad_input_is_one_line(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = getattr(ab, name)
    with pytest.raises(TypeError, match=rf"trial is a Linear.*ab\.{name}\(ab\.Trial\(model\)\)") as told:
        callback(nn.Linear(2, 2))
    assert "\n" not in str(told.value)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"{library} is not installed; pip install") as told:
        callback(ab.Trial(Loop().model))
    assert "\n" not in str(told.value)
