"""Trials in small loops. Oracles: the same loop without a trial, bit for bit; planted clocks; `verify`; counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeCuda
from loops import Loop, equal, planted
from torch import nn

from fp8core import Float8Linear, convert_to_float8_training, verify
from harness import ab, store
from harness.store.compare import paired_ratios
from harness.store.errors import UsageError
from harness.timing.clock import EventClock
from harness.training.ab.plan import BASE, FP8

SHORT = {"steps": 52}  # three rounds


def test_a_trial_finds_the_planted_ratio_and_proves_fp8() -> None:
    loop = Loop()
    result = loop.run(planted(ab.Trial(loop.model, **SHORT)))
    assert loop.turn == 52
    assert result.effect.speedup == pytest.approx(100 / 80)
    assert result.effect.rounds == 3
    assert result.floor == pytest.approx(1.0)
    assert (result.median_ms(BASE), result.median_ms(FP8), result.gap_ms) == pytest.approx((100, 80, 1))
    assert result.proved
    assert result.proof.startswith("FP8 verified: 2 of 2 Linear layers")
    # 4 warm and proved steps in FP8, 3 in bf16; then three rounds of 5 and 10
    assert result.steps_run == (4 + 15, 3 + 30)
    assert result.tokens == 16
    assert sum(result.flops[FP8].values()) == sum(result.flops[BASE].values()) == 5 * 2 * 16 * 32 * 64
    assert set(result.flops[FP8]) == {"e4m3", "e5m2"}
    assert not set(result.flops[BASE]) & {"e4m3", "e5m2"}
    assert result.loss_gap is not None
    assert result.decision == "cannot tell", "a CPU's times decide nothing"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_every_recipe_is_proved_in_the_loop(recipe: str) -> None:
    loop = Loop()
    result = loop.run(ab.Trial(loop.model, recipe, **SHORT))
    assert result.proved, result.proof
    assert not any(r.faults for r in result.rounds)


def test_a_converted_model_is_taken_as_it_is_and_left_as_asked() -> None:
    loop = Loop()
    convert_to_float8_training(loop.model, config="rowwise")
    layers = [m for m in loop.model.modules() if isinstance(m, Float8Linear)]
    recipes = [layer.recipe for layer in layers]
    loop.run(ab.Trial(loop.model, "rowwise", after="fp8", **SHORT))
    assert [layer.recipe for layer in layers] == recipes
    assert verify(loop.step, loop.model, recipe="rowwise", announce=False).ok
    loop.run(ab.Trial(loop.model, "rowwise", after="bf16", **SHORT))
    assert all(layer.recipe.fp8_gemms == 0 for layer in layers)
    again = ab.Trial(loop.model, "rowwise", restore=[loop.optimizer], **SHORT)
    assert loop.run(again).proved, "a trial takes the model that another one left"


def test_a_model_that_came_in_fp8_is_left_in_fp8() -> None:
    loop = Loop()
    convert_to_float8_training(loop.model, config="tensorwise")
    trial = ab.Trial(loop.model, **SHORT)
    loop.model(loop.batch())  # an evaluation before the first step: seen by nothing, in bf16
    layers = [m for m in loop.model.modules() if isinstance(m, Float8Linear)]
    assert all(layer.recipe.fp8_gemms == 0 for layer in layers)
    assert loop.run(trial).ends_in == "FP8"
    assert all(layer.recipe.fp8_gemms == 3 for layer in layers)


def test_a_gpus_steps_are_read_by_its_own_events() -> None:
    """Oracle: the fake device's time, of which the host's work between marks is none."""
    cuda = FakeCuda()
    clock = EventClock(cuda)
    start = clock.mark()
    cuda.enqueue(2.5e-3)
    cuda.time.sleep(1e-3)
    end = clock.mark()
    clock.settle()
    assert clock.ms(start, end) == pytest.approx(2.5, rel=0.01)


def test_held_in_bf16_the_model_trains_as_without_conversion() -> None:
    """Oracle: the unconverted loop, bit for bit, over the steps before the first in FP8."""
    loop, plain = Loop(), Loop()
    trial = ab.Trial(loop.model, **SHORT)
    for _ in range(3):
        with trial.step():
            loop.step()
        plain.step()
    assert equal(loop.state()[:4], plain.state()[:4])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_restored_trial_leaves_no_trace(dropout: float) -> None:
    """Weights, moments, schedule and random numbers, then ten more steps: bit for bit those of a loop without a trial."""
    loop, plain = Loop(dropout=dropout), Loop(dropout=dropout)
    for each in (loop, plain):
        torch.manual_seed(7)
        for _ in range(5):
            each.step()
        each.random = torch.get_rng_state()
    torch.set_rng_state(loop.random)
    result = loop.run(ab.Trial(loop.model, restore=[loop.optimizer, loop.scheduler], **SHORT))
    assert result.restored == ("model", "random numbers", "AdamW", "StepLR")
    assert result.effect.rounds == 3
    loop.turn = plain.turn  # the loader is the loop's own
    for _ in range(10):
        loop.step()
    mine = loop.state()
    torch.set_rng_state(plain.random)
    for _ in range(10):
        plain.step()
    assert equal(mine, plain.state())


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["inside", "between"])
def test_an_exception_restores_too(error: type[BaseException], where: str) -> None:
    loop, plain = Loop(), Loop()
    loop.step()
    plain.step()
    trial = ab.Trial(loop.model, restore=[loop.optimizer, loop.scheduler], **SHORT)

    def ends(turn: int) -> None:
        if turn == 12:
            raise error("planted")

    def train() -> None:
        with trial:
            for turn in range(20):
                ends(turn if where == "between" else 0)
                with trial.step():
                    loop.step()
                    ends(turn)

    with pytest.raises(error):
        train()
    assert trial.done
    assert "planted" in trial.result().doubt or error.__name__ in trial.result().doubt
    assert equal(loop.state()[:-1], plain.state()[:-1])
    assert trial.result().decision == "cannot tell"


class Rows:
    """A loader with a state."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Any:
        while True:
            self.place += 1
            yield torch.full((16, 32), float(self.place))


def test_a_stateful_loader_gives_its_next_batches_again() -> None:
    loop, rows = Loop(), Rows()
    trial = ab.Trial(loop.model, restore=[loop.optimizer, rows], **SHORT)
    for batch in rows:
        with trial.step():
            loop.step(batch)
        if trial.done:
            break
    assert float(next(iter(rows))[0, 0]) == 1.0


def test_the_rows_are_compared_like_any_others(tmp_path: Path) -> None:
    loop = Loop()
    trial = planted(ab.Trial(loop.model, **SHORT))
    loop.run(trial)
    folder = trial.save(tmp_path)
    (pair,) = paired_ratios(store.read([folder])).to_dict("records")
    assert pair["arm"] == "tensorwise"
    assert pair["speedup"] == pytest.approx(1.25)
    assert pair["floor"] == pytest.approx(1.0)
    assert pair["rounds"] == 3


def test_after_its_end_a_trial_does_nothing() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
    result = loop.run(trial)
    with trial.step():
        loop.step()
    assert trial.result() == result
    assert not any(module._forward_hooks for module in loop.model.modules())


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
        (None, {"rank_timeout_s": "x"}, "rank_timeout_s='x'"),
        (None, {"module_filter_fn": lambda module, fqn: False}, "no layer of the model takes FP8"),
        (None, {"module_filter_fn": 3}, "module_filter_fn=3"),
        (None, {"clock": 3}, "clock=3"),
        (None, {"recipe": "rowwise", "fp8_all_gather": True}, "rowwise codes differ"),
        (None, {"recipe": "rowwise", "fp8_all_gather": "both"}, "rowwise codes differ"),
        (None, {"fp8_all_gather": "yes"}, "fp8_all_gather='yes'"),
        ("tensorwise", {"fp8_all_gather": "both"}, "enable_fsdp_float8_all_gather is off"),
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
    model = Loop().model
    with pytest.raises(UsageError, match="GiB of host memory"):
        ab.Trial(model, restore=[], **SHORT)
    assert not any(isinstance(m, Float8Linear) for m in model.modules()), "refused before it was converted"


def test_a_schedule_of_its_own_comes_back_with_its_counters() -> None:
    """A MultiStepLR's state holds a Counter, which is not made from pairs."""
    loop = Loop()
    loop.scheduler = torch.optim.lr_scheduler.MultiStepLR(loop.optimizer, [80, 90])
    loop.run(ab.Trial(loop.model, restore=[loop.optimizer, loop.scheduler], **SHORT))
    assert loop.scheduler.milestones == {80: 1, 90: 1}
    assert loop.scheduler.last_epoch == 0


def test_a_model_that_is_moved_before_the_first_step_is_restored() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, restore=[], **SHORT)
    loop.model.double().float()  # other storages
    before = [p.detach().clone() for p in loop.model.parameters()]
    assert loop.run(trial).restored is not None
    assert equal(before, [p.detach() for p in loop.model.parameters()])


def test_a_model_that_is_moved_meanwhile_is_not_said_to_be_restored() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, restore=[], **SHORT)
    loop.run(trial, most=20)
    loop.model.double().float()
    result = loop.run(trial)
    assert result.restored is None
    assert "NOT put back: " in "\n".join(result.lines())


def test_a_model_compiled_after_the_trial_was_made_keeps_its_graphs() -> None:
    """The order that the tutorial names, with microbatches: what watches the model must add nothing to its guards."""
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
    run = torch.compile(loop.model, backend="aot_eager")

    def step() -> None:
        for _ in range(6):
            _, loss = run(loop.batch())
            loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.turn += 1

    while not trial.done:
        with trial.step():
            step()
    result = trial.result()
    assert result.proved, result.proof
    assert not any(r.faults for r in result.rounds), result.rounds
    assert "shapes of batches were not seen" in "\n".join(result.lines())
