"""What must not count, planted in one process: each is named, and no ratio comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Loop, PlantedClock, planted

from fp8core import PrecisionSchedule
from harness import ab
from harness.training.ab.seen import Looks

STEPS = 52


def run(loop: Loop, trial: Any, before: Any = lambda: None, inside: Any = lambda: None) -> Any:
    planted(trial)
    while not trial.done and loop.turn < STEPS:
        before()
        with trial.step():
            inside()
            loop.step()
    return trial.result()


def test_a_model_that_something_holds_in_bf16_is_disproved() -> None:
    loop, held = Loop(), PrecisionSchedule.parse("keep_bf16")
    trial = ab.Trial(loop.model, steps=STEPS)
    result = run(loop, trial, inside=lambda: held.apply(loop.model, 0, 1))
    assert not result.proved
    assert result.rounds == ()
    assert trial.done


def test_a_model_that_something_holds_in_fp8_is_found_by_its_bf16_steps() -> None:
    loop, free = Loop(), PrecisionSchedule()
    trial = ab.Trial(loop.model, steps=STEPS)
    result = run(loop, trial, inside=lambda: free.apply(loop.model, 0, 1))
    assert not result.proved
    assert "in a step that was to be bf16" in result.doubt or "not in high precision" in result.doubt


def test_a_batch_of_another_length_is_named() -> None:
    loop = Loop()

    def shorter() -> None:
        loop.rows = 8 if loop.turn == 20 else 16

    result = run(loop, ab.Trial(loop.model, steps=STEPS), before=shorter)
    ((arm, why),) = [item for r in result.rounds for item in r.faults.items()]
    assert arm in ("base", "base:again", "fp8")
    assert "8x32" in why
    assert "16x32" in why


def test_a_compilation_within_a_block_is_named() -> None:
    loop = Loop()
    compiled = torch.compile(lambda x: x + loop.turn // 30, backend="eager", dynamic=False)

    def compiles() -> None:
        if loop.turn in (20, 33):
            torch._dynamo.reset()
            compiled(torch.ones(2))

    result = run(loop, ab.Trial(loop.model, steps=STEPS), inside=compiles)
    faults = [why for r in result.rounds for why in r.faults.values()]
    assert faults
    assert all("compiled" in why for why in faults)


@pytest.mark.parametrize("is_fp8", [True, False])
def test_memory_that_runs_out_is_named_with_its_precision(is_fp8: bool) -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, steps=STEPS, restore=[loop.optimizer])

    def out() -> None:
        if loop.turn > 20 and trial._turn.is_fp8 is is_fp8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        run(loop, trial, inside=out)
    result = trial.result()
    assert f"a step in {'FP8' if is_fp8 else 'bf16'} ran out of memory" in result.doubt
    assert result.decision == "cannot tell"
    assert result.restored is not None


def test_a_step_inside_of_a_step_is_refused() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, steps=STEPS)
    with pytest.raises(RuntimeError, match="inside of"), trial.step(), trial.step():
        pass


def test_a_loop_that_ends_early_decides_nothing() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, steps=200)
    loop.run(trial, most=30)
    text = trial.report()
    assert trial.done
    assert "for speed: cannot tell" in text
    assert "1 rounds count" in text


def test_shapes_may_be_told_where_the_model_is_not_seen() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, steps=STEPS)
    trial._clock = PlantedClock(lambda count: 1.0)
    while not trial.done:
        with trial.step({"ids": torch.zeros(2, 7 if loop.turn == 20 else 8)}):
            loop.step()
    ((_, why),) = [item for r in trial.result().rounds for item in r.faults.items()]
    assert "2x7" in why


def test_steps_in_which_the_model_does_not_run_count_for_nothing() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, steps=STEPS)
    while not trial.done:
        with trial.step():
            if loop.turn < trial.plan.before:
                loop.step()
    result = trial.result()
    assert all(len(r.faults) == 3 for r in result.rounds)
    assert "0 forward passes" in result.doubt


def test_a_step_around_each_microbatch_is_found() -> None:
    """The optimizer runs at every second one: no step is as the proved one throughout."""
    loop = Loop()
    trial = ab.Trial(loop.model, steps=STEPS)
    while not trial.done:
        with trial.step():
            _, loss = loop.model(loop.batch())
            loss.backward()
            loop.turn += 1
            if loop.turn % 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert "optimizer steps" in trial.result().doubt
    assert trial.result().effect.rounds == 0


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        (lambda loss: (loss.reshape(1), torch.tensor(0.01)), False),
        (lambda loss: (loss * torch.ones(16), 0.01 * loss), False),  # not reduced: 16 rows
        (lambda loss: (loss.detach(), torch.zeros(4, 4)), False),  # an accuracy, say
        (lambda loss: (loss, torch.zeros(4, 4)), True),
    ],
)
def test_a_number_that_may_be_no_loss_is_not_seen(output: Any, seen: bool) -> None:
    """Oracle: what the model is planted to return; in each case but the last, the loss of a step is not to be told."""
    weight = torch.ones((), requires_grad=True)

    class Planted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return output(weight * x.square().mean())

    model = Planted()
    looks = Looks(model)
    looks.start(None)
    model(torch.ones(16, 4))
    assert (None if looks.loss is None else float(looks.loss)) == (1.0 if seen else None)
    looks.close()
