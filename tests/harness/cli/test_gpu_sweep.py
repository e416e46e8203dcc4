"""The parts of `sweep=gpu`. Oracle: the plan itself, which knows every key, axis, arm and the length of a model."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest

from harness.cli.config import Request, load
from harness.cli.parts import NEEDS
from harness.engine.parts import LEAST_ROUNDS, PATIENCE, TRIES, Part, parts_of, timetable
from harness.engine.plan import Plan, make_plan
from harness.suites import SUITES
from harness.timing.session import METERED_S

FIRST_SLOT_S, SLOT_S = 400, 510
TEXT = Path(__file__).parents[3] / "docs" / "numerics.md"
READ = ("train", "nanogpt_char")  # sweeps that train, and nothing else
PARTS = {
    device: parts_of(load(["sweep=gpu"], lambda asked, d=device: d).config, NEEDS)
    for device in ("cuda", "cpu")
}
NAMES = [part.name for part in PARTS["cuda"]]


def part_of(name: str, device: str = "cuda") -> Part:
    return next(part for part in PARTS[device] if part.name == name)


@functools.cache
def planned(name: str, device: str) -> tuple[Request, Plan]:
    """With another text where one is read: nanoGPT's is no part of a clone."""
    part = part_of(name, device)
    words = [word for word in part.words(rehearsed=device == "cpu") if word != "data=shakespeare"]
    text = ["data=bytes", f"data_path={TEXT}"] if part.sweep in READ else []
    request = load([*words, *text], lambda _: device)
    return request, make_plan(request.config, SUITES)


def test_the_order_is_that_of_what_a_reader_would_miss_most() -> None:
    """Oracle: the order that the parts had as a command of their own, by hand."""
    assert NAMES == [
        "start", "smoke", "eager", "casts", "compiled", "compiled_torchao", "tests", "fused", "nocompile", "rowwise", "ceilings",
        "gemm", "nanogpt_char", "gpt2_graph", "gpt2_eager", "gpt2_advised", "accumulation", "codes", "llama3_1b", "linear",
        "peers",
    ]  # fmt: skip


def test_the_first_slot_holds_the_headline_by_estimate() -> None:
    """At most 400 s, so that 1.3 times as much fits into a slot of 8.5 minutes, budgets of the parts included."""
    lines = [line for line in timetable(PARTS["cuda"], SLOT_S) if line.slot == 1]
    names = [line.part.name for line in lines]
    assert names[:6] == ["start", "smoke", "eager", "casts", "compiled", "compiled_torchao"]
    assert sum(line.part.estimate_s or 0 for line in lines[:6]) <= FIRST_SLOT_S
    slow = {line.part.name: line for line in timetable(PARTS["cuda"], SLOT_S, 1.3) if line.slot == 1}
    assert not any(slow[name].cut for name in names[:5])
    assert PATIENCE > 1.3


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 1.5, 4.0])
def test_a_timetable_ends_and_begins_nothing_that_its_slot_has_no_time_for(factor: float) -> None:
    lines = timetable(PARTS["cuda"], SLOT_S, factor)
    assert {line.part.name for line in lines} == set(NAMES)
    assert all(line.ends <= SLOT_S for line in lines)
    for before, after in itertools.pairwise(lines):
        assert after.slot > before.slot or after.begins == pytest.approx(before.ends)
    for name in NAMES:
        mine = [line for line in lines if line.part.name == name]
        assert len({line.slot for line in mine}) == len(mine) <= TRIES
        assert not any(line.cut for line in mine) or factor > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_is_a_plan_with_something_to_run_on_a_cpu(name: str) -> None:
    _, plan = planned(name, "cpu")
    arms = [arm for case in plan.cases for arm in case.runnable]
    assert 0 < len(arms) <= 80
    assert not any(arm.endswith(("_compile", "_graph")) for arm in arms)
    assert {case.suite for case in plan.cases} == {case.suite for case in planned(name, "cuda")[1].cases}


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_a_command_that_the_plan_accepts(name: str) -> None:
    part = part_of(name)
    request, plan = planned(name, "cuda")
    assert plan.cases
    if part.sweep == "train":
        (case,) = plan.cases
        assert 2 <= len(case.arms) <= 3
        assert request.timing.checkpoint_s == 0
        assert (
            request.timing.min_rounds == request.timing.max_rounds == part.overrides["rounds"] >= LEAST_ROUNDS
        )
        assert request.timing.max_seconds >= part.overrides["rounds"] * request.timing.block_ms / 1000
        assert not request.config["warm_compile"], "cold only"
        if name != "compiled_torchao":
            assert request.timing.block_ms > 1000 * METERED_S
    assert set(part.kernels) <= set(part.overrides.get("arms", ()))


def test_the_titles_say_what_is_trained() -> None:
    """Oracle: the axes and the model's own number of blocks."""
    from harness.training.models import MODELS

    for part in PARTS["cuda"]:
        if part.sweep != "train":
            continue
        (case,) = planned(part.name, "cuda")[1].cases
        spec = MODELS[case.case.text("model")]
        blocks = case.case.integer("layers") or spec.layers
        if spec.name == "llama3_8b":
            assert f"{blocks} Llama-3-8B blocks" in part.about
        elif part.name != "gpt2_advised":
            assert f"{blocks} blocks, byte vocabulary" in part.about


def test_a_part_that_is_tried_again_has_fewer_rounds_and_may_leave_arms_out() -> None:
    part = part_of("casts")
    assert [next(w for w in part.words(tries) if w.startswith("rounds=")) for tries in range(4)] == [
        "rounds=12", "rounds=6", f"rounds={LEAST_ROUNDS}", f"rounds={LEAST_ROUNDS}",
    ]  # fmt: skip
    assert [w for w in part.words(without=("fused_both",)) if w.startswith(("arms", "without"))] == [
        "arms=[fused,fused_both,torchao_compile,copy,read]", "without=[fused_both]",
    ]  # fmt: skip


def test_the_loss_is_that_of_the_published_setting() -> None:
    """Oracle: karpathy/nanoGPT, config/train_shakespeare_char.py, as far as the bar of the summary asks for it."""
    from harness.judge.verdict.result import MIN_SEEDS
    from harness.report.summary import NANOGPT

    (name,) = (part.name for part in PARTS["cuda"] if "text" in part.needs)
    _, plan = planned(name, "cuda")
    for case in plan.cases:
        axes = dict(case.case.axes)
        assert {name: axes[name] for name in NANOGPT if name != "data"} == {
            name: value for name, value in NANOGPT.items() if name != "data"
        }
        assert case.arms == ("base", "tensorwise")
    assert "data=shakespeare" in part_of(name).words()
    assert len({case.case["seed"] for case in plan.cases}) >= MIN_SEEDS
    assert len({case.case["seed"] for case in planned(name, "cpu")[1].cases}) >= MIN_SEEDS


def test_a_word_of_the_rehearsal_takes_the_place_of_the_one_with_its_key() -> None:
    part = Part("a", "cast", overrides={"axes.M": [9], "arms": ["eager", "compile"]}, small={"axes.M": [1]})
    assert part.words() == ["sweep=cast", "axes.M=[9]", "arms=[eager,compile]"]
    assert part.words(rehearsed=True) == ["sweep=cast", "axes.M=[1]", "arms=[eager,compile]"]
