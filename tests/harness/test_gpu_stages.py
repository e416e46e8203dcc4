"""The parts of a GPU session. Oracle: the plan itself, which knows every key, axis, arm and the length of a model."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from harness.cli.gpu.gpu_schedule import is_open, next_turn, timetable
from harness.cli.gpu.gpu_stages import LEAST_ROUNDS, PATIENCE, STAGES, TRIES, Stage

from harness.cli.config import Request, load
from harness.engine.plan import Plan, make_plan
from harness.suites import SUITES
from harness.timing.session import METERED_S

FIRST_SLOT_S, SLOT = 400, 8.5
TEXT = Path(__file__).parents[2] / "docs" / "numerics.md"
READ = ("train", "nanogpt_char")  # sweeps that train, and nothing else
SWEEPS = [stage for stage in STAGES if stage.name != "tests"]


@functools.cache
def planned(stage: Stage, device: str) -> tuple[Request, Plan]:
    """With another text where one is read: nanoGPT's is no part of a clone."""
    words = [word for word in stage.command(device) if word != "data=shakespeare"]
    text = ["data=bytes", f"data_path={TEXT}"] if stage.sweep in READ else []
    request = load([*words, *text], lambda _: device)
    return request, make_plan(request.config, SUITES)


def test_the_first_slot_holds_the_headline_by_estimate() -> None:
    """At most 400 s, so that 1.3 times as much fits into a slot of 8.5 minutes, budgets of the parts included."""
    lines = [line for line in timetable(SLOT) if line.slot == 1]
    names = [line.stage.name for line in lines]
    assert names[:6] == ["start", "smoke", "eager", "casts", "compiled", "compiled_torchao"]
    assert sum(line.stage.seconds for line in lines[:6]) <= FIRST_SLOT_S
    slow = {line.stage.name: line for line in timetable(SLOT, 1.3) if line.slot == 1}
    assert not any(slow[name].cut for name in names[:5])
    assert PATIENCE > 1.3


def test_files_and_names_are_few_and_unique() -> None:
    assert len({stage.packed for stage in SWEEPS}) + len(("report.html", "report.md", "tests.txt")) <= 8
    assert len({stage.name for stage in STAGES}) == len(STAGES)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 1.5, 4.0])
def test_a_timetable_ends_and_begins_nothing_that_its_slot_has_no_time_for(factor: float) -> None:
    lines = timetable(SLOT, factor)
    assert {line.stage.name for line in lines} == {stage.name for stage in STAGES}
    assert all(line.ends <= 60 * SLOT for line in lines)
    for before, after in itertools.pairwise(lines):
        assert after.slot > before.slot or after.begins == pytest.approx(before.ends)
    for stage in STAGES:
        mine = [line for line in lines if line.stage is stage]
        assert len({line.slot for line in mine}) == len(mine) <= TRIES
        assert not any(line.cut for line in mine) or factor > 1


def test_a_part_that_is_done_or_cut_too_often_is_not_begun() -> None:
    first = STAGES[0]
    assert is_open(first, {})
    assert not is_open(first, {first.name: {"done": True, "tries": 1}})
    assert not is_open(first, {first.name: {"done": False, "tries": TRIES}})
    turn = next_turn({first.name: {"done": True}}, 60 * SLOT, [])
    assert turn is not None
    assert turn.stage is STAGES[1]
    assert next_turn({}, 10.0, []) is None


@pytest.mark.parametrize("stage", SWEEPS, ids=lambda stage: stage.name)
def test_a_rehearsal_is_a_plan_with_something_to_run_on_a_cpu(stage: Stage) -> None:
    _, plan = planned(stage, "cpu")
    arms = [arm for case in plan.cases for arm in case.runnable]
    assert 0 < len(arms) <= 80
    assert not any(arm.endswith(("_compile", "_graph")) for arm in arms)
    assert {case.suite for case in plan.cases} == {case.suite for case in planned(stage, "cuda")[1].cases}


@pytest.mark.parametrize("stage", SWEEPS, ids=lambda stage: stage.name)
def test_a_part_is_a_command_that_the_plan_accepts(stage: Stage) -> None:
    request, plan = planned(stage, "cuda")
    assert plan.cases
    if stage.sweep == "train":
        (case,) = plan.cases
        assert 2 <= len(case.arms) <= 3
        assert request.timing.checkpoint_s == 0
        assert request.timing.min_rounds == request.timing.max_rounds == stage.rounds >= LEAST_ROUNDS
        assert request.timing.max_seconds >= stage.rounds * request.timing.block_ms / 1000
        assert not request.config["warm_compile"], "cold only"
        if stage.name != "compiled_torchao":
            assert request.timing.block_ms > 1000 * METERED_S
    for arm in stage.needs:
        assert arm in stage.arms


def test_the_titles_say_what_is_trained() -> None:
    """Oracle: the axes and the model's own number of blocks."""
    from harness.training.models import MODELS

    for stage in SWEEPS:
        if stage.sweep != "train":
            continue
        (case,) = planned(stage, "cuda")[1].cases
        spec = MODELS[case.case.text("model")]
        blocks = case.case.integer("layers") or spec.layers
        if spec.name == "llama3_8b":
            assert f"{blocks} Llama-3-8B blocks" in stage.about
        elif stage.name != "gpt2_advised":
            assert f"{blocks} blocks, byte vocabulary" in stage.about


def test_a_part_that_is_tried_again_has_fewer_rounds_and_may_leave_arms_out() -> None:
    stage = next(stage for stage in STAGES if stage.name == "casts")
    assert [next(w for w in stage.command("cuda", tries) if w.startswith("rounds=")) for tries in range(4)] == [
        "rounds=12", "rounds=6", "rounds=3", "rounds=3",
    ]  # fmt: skip
    assert "arms=[fused,torchao_compile,copy,read]" in stage.command("cuda", 0, ("fused_both",))


def test_the_loss_is_that_of_the_published_setting() -> None:
    """Oracle: karpathy/nanoGPT, config/train_shakespeare_char.py, as far as the bar of the summary asks for it."""
    from harness.cli.gpu.gpu_summary import NANOGPT

    from harness.judge.verdict.result import MIN_SEEDS

    (stage,) = (stage for stage in STAGES if stage.reads_text)
    _, plan = planned(stage, "cuda")
    for case in plan.cases:
        axes = dict(case.case.axes)
        assert {name: axes[name] for name in NANOGPT if name != "data"} == {
            name: value for name, value in NANOGPT.items() if name != "data"
        }
        assert case.arms == ("base", "tensorwise")
    assert "data=shakespeare" in stage.command("cuda")
    assert len({case.case["seed"] for case in plan.cases}) >= MIN_SEEDS
    assert len({case.case["seed"] for case in planned(stage, "cpu")[1].cases}) >= MIN_SEEDS


def test_a_word_of_the_rehearsal_takes_the_place_of_the_one_with_its_key() -> None:
    stage = Stage(
        "cast", 60, "", ("axes.M=[9]", "arms=[tensorwise_eager,tensorwise_compile]"), ("axes.M=[1]",)
    )
    assert stage.command("cuda") == ["sweep=cast", "axes.M=[9]", "arms=[tensorwise_eager,tensorwise_compile]"]
    assert {"sweep=cast", "axes.M=[1]", "arms=[tensorwise_eager]", "rounds=3"} < set(stage.command("cpu"))
