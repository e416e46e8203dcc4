"""Trials in small loops: what they find, how they end, what must not count, and steps that hooks of a framework begin and end.

Oracles: the same loop without a trial, bit for bit; planted clocks and faults; `verify`; counts by hand.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from loops import Loop, equal, planted
from torch import nn
from torch._C._autograd import _profiler_enabled

from fp8core import Float8Linear, PrecisionSchedule, convert_to_float8_training, verify
from harness import ab
from harness.store.errors import UsageError

SHORT: dict[str, Any] = {"steps": 52}  # three rounds


def faults_of(trial: Any) -> list[str]:
    return [why for r in trial.result().rounds for why in r.faults.values()]


def layers_of(loop: Loop) -> list[Float8Linear]:
    return [m for m in loop.model.modules() if isinstance(m, Float8Linear)]


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    )


def test_a_converted_model_is_taken_as_it_is_and_left_as_it_came_or_as_asked() -> None:
    loop = Loop()
    convert_to_float8_training(loop.model, config="rowwise")
    recipes = [layer.recipe for layer in layers_of(loop)]
    trial = ab.Trial(loop.model, "rowwise", **SHORT)
    loop.model(loop.batch())  # an evaluation before the first step: seen by nothing, in bf16
    assert all(layer.recipe.fp8_gemms == 0 for layer in layers_of(loop))
    assert loop.run(trial).ends_in == "FP8"
    assert [layer.recipe for layer in layers_of(loop)] == recipes
    assert verify(loop.step, loop.model, recipe="rowwise", announce=False).ok
    loop.run(ab.Trial(loop.model, "rowwise", after="bf16", **SHORT))
    assert all(layer.recipe.fp8_gemms == 0 for layer in layers_of(loop))
    again = ab.Trial(loop.model, "rowwise", restore=[loop.optimizer], after="fp8", **SHORT)
    assert loop.run(again).proved, "a trial takes the model that another one left"
    assert [layer.recipe for layer in layers_of(loop)] == recipes


class Rows:
    """A loader with a state, that may refuse to be put back."""

    def __init__(self) -> None:
        self.place, self.refuses = 0, False

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise KeyError("planted")
        self.place = state["place"]

    def advance(self) -> None:
        self.place += 1


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_restored_trial_leaves_no_trace(dropout: float) -> None:
    """Weights, moments, schedule and random numbers, then ten more steps: bit for bit those of a loop without a trial.

    A MultiStepLR's state holds a Counter, which is not made from pairs.
    """
    loop, plain, rows = Loop(dropout=dropout), Loop(dropout=dropout), Rows()

    def train(each: Loop, steps: int) -> None:
        for _ in range(steps):
            each.step()

    torch.manual_seed(7)
    train(plain, 5)
    random = torch.get_rng_state()
    train(plain, 10)
    expected = plain.state()
    torch.manual_seed(7)
    train(loop, 5)
    trial = ab.Trial(loop.model, restore=[loop.optimizer, loop.scheduler, rows], **SHORT)
    loop.model.double().float()  # moved before the first step: other storages
    result = loop.run(trial, before=rows.advance)
    assert result.restored == ("model", "random numbers", "AdamW", "MultiStepLR", "Rows")
    assert result.effect.rounds == 3
    assert rows.place == 0
    assert torch.equal(torch.get_rng_state(), random)
    loop.turn = 5  # the loader is the loop's own
    train(loop, 10)
    assert equal(loop.state(), expected)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    ("error", "at", "told"),
    [
        (
            ZeroDivisionError("planted"),
            2,
            "a step in bf16 raised ZeroDivisionError: planted",
        ),  # counts bf16's GEMMs
        (KeyboardInterrupt(), 5, "a step in FP8, compared with .* raised KeyboardInterrupt"),
        (
            ZeroDivisionError("planted"),
            -12,
            "the loop raised ZeroDivisionError: planted",
        ),  # between two steps
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            20,
            "a step in .* ran out of memory",
        ),
    ],
)
def test_an_exception_restores(error: BaseException, at: int, told: str, hooked: bool) -> None:
    loop = Loop()
    loop.step()
    before, plain = loop.state(), hooks_of(loop.model)
    trial = ab.Trial(loop.model, restore=[loop.optimizer, loop.scheduler], **SHORT)

    def end(turn: int) -> None:
        if turn == at:
            raise error

    def train() -> None:
        for turn in range(25):
            end(-turn)
            if hooked:
                trial.begin_step()
                loop.step()
                end(turn)
                trial.end_step()
            else:
                with trial.step():
                    loop.step()
                    end(turn)

    with pytest.raises(type(error)), trial:
        train()
    trial.end_step()  # a framework that calls it late: nothing
    assert trial.done
    assert re.search(f"^{told}", trial.result().problem)
    assert trial.result().decision == "cannot tell"
    assert trial.result().restored is not None
    assert equal(loop.state(), before)
    assert hooks_of(loop.model) == plain, "what watched the step is gone"
    assert torch.overrides._get_current_function_mode_stack() == []


def converted(recipe: str) -> nn.Module:
    return convert_to_float8_training(Loop().model, config=recipe)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (None, {"recipe": "nonsense"}, "nonsense"),
        (None, {"recipe": None}, "recipe=None"),
        (None, {"steps": 20}, "steps=20"),
        (None, {"after": "fp16"}, "after='fp16'"),
        (None, {"restore": [object()]}, "object has no state_dict"),
        (None, {"restore": nn.Linear(2, 2)}, "restore=Linear"),
        (None, {"module_filter_fn": lambda module, fqn: False}, "no layer of the model takes FP8"),
        (None, {"recipe": "rowwise", "fp8_all_gather": True}, "rowwise codes differ"),
        (None, {"fp8_all_gather": "yes"}, "fp8_all_gather='yes'"),
        ("rowwise", {}, "converted with rowwise"),
        (nn.Linear(32, 32), {}, "wrap it in a module"),
        (3, {}, "model"),
    ],
)
def test_what_cannot_be_is_refused_at_once_in_a_line(model: Any, given: dict[str, Any], words: str) -> None:
    plain: Any = Loop().model
    taken = plain if model is None else converted(model) if isinstance(model, str) else model
    with pytest.raises((UsageError, ValueError, TypeError), match=words) as error:
        ab.Trial(taken, **given)
    assert "\n" not in str(error.value)
    assert type(plain.up) is nn.Linear, "refused before it was converted"


def test_a_snapshot_that_does_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Free)
    loop = Loop()
    with pytest.raises(UsageError, match="GiB of host memory"):
        ab.Trial(loop.model, restore=[], **SHORT)
    assert not layers_of(loop), "refused before it was converted"


def test_a_model_held_in_part_by_a_schedule_is_refused() -> None:
    loop = Loop()
    convert_to_float8_training(loop.model)
    PrecisionSchedule.parse("keep_bf16@up").apply(loop.model, 0, 1)
    with pytest.raises(UsageError, match="a PrecisionSchedule holds a part"):
        ab.Trial(loop.model)


def replaced(model: Any) -> None:
    """Like a buffer that each step computes anew; where the first one is not kept alive, a later one soon has its id."""
    first = id(model.seen)
    for _ in range(100):
        model.seen = model.seen.clone()
        if id(model.seen) == first:
            break


def reshaped(model: Any) -> None:
    model.up.bias.data = torch.zeros(1)


@pytest.mark.parametrize("change", [replaced, reshaped])
def test_a_model_that_is_another_meanwhile_is_not_said_to_be_restored(change: Any) -> None:
    loop = Loop()
    loop.model.register_buffer("seen", torch.zeros(2))
    trial = ab.Trial(loop.model, restore=[], **SHORT)
    loop.run(trial, most=20)
    change(loop.model)
    trained = loop.weights()
    trial.close()
    assert trial.result().restored is None
    assert "NOT put back: " in "\n".join(trial.result().lines())
    assert equal(loop.weights(), trained), "nothing of it was put back"


def test_a_model_compiled_after_the_trial_was_made_keeps_its_graphs() -> None:
    """The order that the tutorial names, with microbatches: what watches the model must add nothing to its guards."""
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
    run = torch.compile(loop.model, backend="aot_eager")
    while not trial.done:
        with trial.step():
            for _ in range(6):
                run(loop.batch())[1].backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.turn += 1
    assert trial.result().proved, trial.result().proof
    assert not faults_of(trial)
    assert "shapes of batches were not seen" in trial.report()


@pytest.mark.parametrize(
    ("schedule", "doubt"), [("keep_bf16", ""), ("", "in a step that was to be bf16|not in high precision")]
)
def test_a_model_that_something_holds_in_one_precision_is_disproved(schedule: str, doubt: str) -> None:
    loop = Loop()
    held = PrecisionSchedule.parse(schedule)
    trial = ab.Trial(loop.model, **SHORT)
    result = loop.run(planted(trial), inside=lambda: held.apply(loop.model, 0, 1))
    assert not result.proved
    assert re.search(doubt, result.doubt)
    assert not schedule or result.rounds == ()
    assert trial.done


def shorter(loop: Loop, trial: Any) -> None:
    with trial.step():
        loop.rows = 8 if loop.turn == 20 else 16
        loop.step()


def told(loop: Loop, trial: Any) -> None:
    """The model is not the module that is called."""
    with trial.step({"ids": torch.zeros(8 if loop.turn == 20 else 16, 32)}):
        loop.step()


def added(loop: Loop, trial: Any) -> None:
    """Microbatches come one by one."""
    trial.begin_step()
    for _ in range(2):
        trial.add_batch(torch.zeros(8 if loop.turn == 20 else 16, 32))
    loop.step()
    trial.end_step()


@pytest.mark.parametrize("step", [shorter, told, added])
def test_a_batch_of_another_length_is_named(step: Any) -> None:
    loop = Loop()
    trial = planted(ab.Trial(loop.model, **SHORT))
    while not trial.done:
        step(loop, trial)
    (why,) = faults_of(trial)
    assert re.search(r"8x32.*, where the proved one had .*16x32", why)
    assert why.count("16x32") == (2 if step is added else 1)


def compiles(loop: Loop) -> None:
    if loop.turn in (20, 33):
        torch._dynamo.reset()
        torch.compile(torch.neg, backend="eager", dynamic=False)(torch.ones(2))
    loop.step()


def does_not_run(loop: Loop) -> None:
    if loop.turn < 7:
        loop.step()


def is_a_microbatch(loop: Loop) -> None:
    """The optimizer runs at every second one: no step is as the proved one throughout."""
    loop.model(loop.batch())[1].backward()
    loop.turn += 1
    if loop.turn % 2:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("step", "words", "most"),
    [
        (compiles, "compiled", 4),
        (does_not_run, "a step of 0 forward passes", 9),
        (is_a_microbatch, "optimizer steps", 9),
    ],
)
def test_steps_that_are_not_as_the_proved_one_count_for_nothing(step: Any, words: str, most: int) -> None:
    loop = Loop()
    trial = planted(ab.Trial(loop.model, **SHORT))
    while not trial.done:
        with trial.step():
            step(loop)
    assert 1 <= len(faults_of(trial)) <= most
    assert all(words in why for why in faults_of(trial))
    assert words in trial.result().doubt or most < 9


def test_a_step_inside_of_a_step_is_refused() -> None:
    trial = ab.Trial(Loop().model, **SHORT)
    with pytest.raises(RuntimeError, match="inside of"), trial.step(), trial.step():
        pass


@pytest.mark.parametrize("then", ["step", "hooks", "close"])
def test_a_failed_restore_is_tried_again_unless_the_loop_trains_on(then: str) -> None:
    loop, rows = Loop(), Rows()
    initial = loop.weights()
    trial = ab.Trial(loop.model, restore=[loop.optimizer, rows], **SHORT)
    rows.refuses = True
    assert loop.run(trial).restored is None
    assert "put back before it: AdamW" in trial.result().not_restored
    rows.refuses = False
    if then == "step":
        with trial.step():
            loop.step()
    elif then == "hooks":
        trial.begin_step()
        loop.step()
        trial.end_step()
    after = loop.weights()
    trial.close()
    if then == "close":
        assert trial.result().restored == ("model", "random numbers", "AdamW", "Rows")
        assert equal(loop.weights(), initial)
    else:
        assert trial.result().restored is None
        assert equal(loop.weights(), after), "steps that ran since are kept"


def test_a_trial_that_cannot_begin_is_over_and_a_profiler_of_the_users_own_is_not_ended() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, restore=[], **SHORT)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        with pytest.raises(UsageError, match="a profiler is active"), trial.step():
            pass
        assert _profiler_enabled()
        torch.ones(2).add(1)
    assert any(event.name == "aten::add" for event in mine.events())
    assert trial.done
    assert "the trial could not begin: UsageError: a profiler" in trial.result().problem
    assert not hooks_of(loop.model)
    with trial.step():
        trial.add_batch(loop.batch())  # a callback tells what it knows, the trial's step or not
        trial.loss(0.0)
        loop.step()
    assert trial.result().steps_run == (0, 0)


@pytest.mark.parametrize("end", ["report", "with", "begin_step"])
def test_a_step_that_no_hook_ended_counts_for_nothing(end: str) -> None:
    """Another callback may stop an epoch between microbatches."""
    loop = Loop()
    before = loop.weights()
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
    assert equal(loop.weights(), before)


@pytest.mark.parametrize(
    ("name", "library"), [("hugging_face_callback", "transformers"), ("lightning_callback", "lightning")]
)
def test_bad_input_of_an_adapter_is_one_line(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = getattr(ab, name)
    with pytest.raises(TypeError, match=rf"^trial is a Linear.*ab\.{name}\(ab\.Trial\(model\)\)$"):
        callback(nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"^{library} is not installed; in a checkout: pip install.*$"):
        callback(ab.Trial(Loop().model))
