"""Trials in small loops: what they find, how they end, what must not count, and steps that hooks of a framework begin and end.

Oracles: the same loop without a trial, bit for bit; planted clocks and faults; `verify`; counts by hand.
"""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeCuda
from loops import Loop, PlantedClock, equal, planted
from test_result import of_h200
from torch import nn

from fp8core import RECIPES, Float8Linear, PrecisionSchedule, convert_to_float8_training, verify
from fp8core.extensions import Extension
from harness import ab, store
from harness.machine import hardware, mfu
from harness.store import read
from harness.store.compare import paired_ratios
from harness.store.errors import UsageError
from harness.timing.clock import EventClock
from harness.training.ab import rows
from harness.training.ab.facts import Known
from harness.training.ab.plan import BASE, FP8, Plan
from harness.training.ab.proving import is_profiled
from harness.training.ab.seen import Looks

SHORT: dict[str, Any] = {"steps": 52}  # three rounds


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


@pytest.mark.parametrize(
    ("schedule", "doubt"), [("keep_bf16", ""), ("", "in a step that was to be bf16|not in high precision")]
)
def test_a_model_that_something_holds_in_one_precision_is_disproved(schedule: str, doubt: str) -> None:
    loop = Loop()
    held = PrecisionSchedule.parse(schedule) if schedule else PrecisionSchedule()
    trial = ab.Trial(loop.model, **SHORT)
    result = loop.run(planted(trial), inside=lambda: held.apply(loop.model, 0, 1))
    assert not result.proved
    assert re.search(doubt, result.doubt)
    assert not schedule or result.rounds == ()
    assert trial.done


def test_a_batch_of_another_length_is_named() -> None:
    loop = Loop()

    def shorter() -> None:
        loop.rows = 8 if loop.turn == 20 else 16

    result = loop.run(planted(ab.Trial(loop.model, **SHORT)), before=shorter)
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

    result = loop.run(planted(ab.Trial(loop.model, **SHORT)), inside=compiles)
    faults = [why for r in result.rounds for why in r.faults.values()]
    assert faults
    assert all("compiled" in why for why in faults)


@pytest.mark.parametrize("is_fp8", [True, False])
def test_memory_that_runs_out_is_named_with_its_precision(is_fp8: bool) -> None:
    loop = Loop()
    trial = planted(ab.Trial(loop.model, **SHORT, restore=[loop.optimizer]))

    def out() -> None:
        if loop.turn > 20 and trial._turn.is_fp8 is is_fp8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        loop.run(trial, inside=out)
    result = trial.result()
    assert f"a step in {'FP8' if is_fp8 else 'bf16'} ran out of memory" in result.doubt
    assert result.decision == "cannot tell"
    assert result.restored is not None


def test_a_step_inside_of_a_step_is_refused() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
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
    trial = ab.Trial(loop.model, **SHORT)
    trial._clock = PlantedClock(lambda count: 1.0)
    while not trial.done:
        with trial.step({"ids": torch.zeros(2, 7 if loop.turn == 20 else 8)}):
            loop.step()
    ((_, why),) = [item for r in trial.result().rounds for item in r.faults.items()]
    assert "2x7" in why


def test_steps_in_which_the_model_does_not_run_count_for_nothing() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
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
    trial = ab.Trial(loop.model, **SHORT)
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


class Broken:
    """A loader whose state cannot be put back, until it is mended."""

    mended = False

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.mended:
            raise KeyError("planted")


def with_broken() -> tuple[Loop, Broken, Any]:
    loop, broken = Loop(), Broken()
    trial = ab.Trial(loop.model, restore=[loop.optimizer, broken], **SHORT)
    loop.run(trial)
    return loop, broken, trial


@pytest.mark.parametrize("by_hooks", [False, True])
def test_after_a_failed_restore_the_loop_trains_on(by_hooks: bool) -> None:
    loop, broken, trial = with_broken()
    assert trial.result().restored is None
    broken.mended = True
    before = [p.detach().clone() for p in loop.model.parameters()]
    if by_hooks:
        trial.begin_step()
        loop.step()
        trial.end_step()
    else:
        with trial.step():
            loop.step()
    after = [p.detach().clone() for p in loop.model.parameters()]
    assert not equal(before, after)
    with trial.step():
        pass
    trial.close()
    assert equal([p.detach() for p in loop.model.parameters()], after), "steps that ran since are kept"
    assert trial.result().restored is None


def test_close_tries_a_failed_restore_again_at_once() -> None:
    loop, broken, trial = with_broken()
    broken.mended = True
    trial.close()
    assert trial.result().restored == ("model", "random numbers", "AdamW", "Broken")
    assert equal(
        [p.detach() for p in loop.model.parameters()], [p.detach() for p in Loop().model.parameters()]
    )


@pytest.mark.parametrize("changes", [{"problem": "rank 1: planted"}, {"proved": False, "proof": "planted"}])
def test_no_line_gives_a_ratio_where_the_trial_has_none(changes: dict[str, Any], tmp_path: Path) -> None:
    result = of_h200(**changes)
    told = result.lines()
    assert told[0].startswith("FP8 (tensorwise) against bf16 in this loop: no ratio: ")
    assert "planted" in told[0]
    assert not any(line.startswith(("step:", "between", "energy", "mixed", "peak", "loss")) for line in told)
    assert "x (" not in "\n".join(told)
    folder = rows.store(replace(result, device="cpu"), Plan(), "Net", tmp_path, True)
    assert set(read([folder])["status"]) == {"failed"}


def test_blocks_left_out_give_no_energy_memory_or_slow_rank() -> None:
    def message(factor: float, fault: str = "") -> dict[str, Any]:
        return {
            "times_ms": {BASE: [100.0], FP8: [100.0 * factor]},
            "gaps_ms": {BASE: [1.0], FP8: [1.0 * factor]},
            "faults": {FP8: fault} if fault else {},
            "peaks": {BASE: 10, FP8: 10 * round(factor)},
            "joules": {BASE: 5.0, FP8: 5.0 * factor},
            "own_ms": {BASE: [100.0], FP8: [100.0 * factor]},
        }

    known = Known()
    for index in range(4):
        known.add_round(index, [message(1.0), message(7.0, "compiled")])
    assert known.peak_bytes == {BASE: 10}
    assert dict(known.joules) == {BASE: [(i, 5.0) for i in range(4)]}
    assert known.slow_rank() == ""


def test_rows_of_a_recipe_from_another_package_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the entry point that the table is told of; the baseline has nothing of it."""
    of = Extension("recipes", "tensorwise", "acme-fp8", "1.2", "acme:RECIPE", lambda: None)
    monkeypatch.setitem(RECIPES._owners, "tensorwise", of)
    extensions = {m.arm: m.resolved.get("extensions") for m in rows.measurements(of_h200(), Plan(), "Net")}
    assert extensions == {m: {"acme-fp8": "1.2"} if m == "tensorwise" else None for m in extensions}
    assert {"tensorwise", "base"} <= set(extensions)


def test_hfu_is_not_claimed_where_recomputation_is_not_known(tmp_path: Path) -> None:
    folder = rows.store(of_h200(device="cpu"), Plan(), "Net", tmp_path, True)
    found = read([folder])
    device = hardware.lookup("NVIDIA H200", 139.8)
    for row in found[found["metric"] == "time_ms"].to_dict("records"):
        (used,) = mfu.of_row({str(key): value for key, value in row.items()}, device)
        assert used.mfu_mixed is not None
        assert used.hfu is None


def test_a_trial_that_cannot_begin_is_over() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, fp8_all_gather="both", restore=[], steps=100)
    with pytest.raises(UsageError, match="FSDP2 does not shard"), trial.step():
        loop.step()
    assert trial.done
    assert "the trial could not begin: UsageError: fp8_all_gather='both'" in trial.result().problem
    assert not any(m._forward_hooks for m in loop.model.modules())
    with trial.step():
        loop.step()
    assert trial.result().steps_run == (0, 0)


def test_a_profiler_of_the_users_own_is_not_ended() -> None:
    loop = Loop()
    trial = ab.Trial(loop.model, **SHORT)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        with pytest.raises(UsageError, match="a profiler is active") as error, trial.step():
            loop.step()
        assert is_profiled()
        torch.ones(2).add(1)
    assert "\n" not in str(error.value)
    assert any(event.name == "aten::add" for event in mine.events())
    assert trial.done


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
