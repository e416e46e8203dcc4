"""The parts of `sweep=gpu`. Oracle: the plan itself, which knows every key, axis, arm and the length of a model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from harness.cli.config import Request, load
from harness.cli.parts import PATIENCE, Part, parts_of, timetable
from harness.engine.plan import Plan, make_plan
from harness.judge.verdict.result import MIN_SEEDS
from harness.suites import SUITES
from harness.timing.session import METERED_S

FIRST_SLOT_S, SLOT_S = 400, 510
LEAST_ROUNDS = 3  # an interval needs them
TEXT = Path(__file__).parents[3] / "docs" / "numerics.md"
READ = ("train", "nanogpt_char")  # sweeps that train, and nothing else
PARTS = {
    device: parts_of(load(["sweep=gpu"], lambda asked, d=device: d).config) for device in ("cuda", "cpu")
}
NAMES = [part.name for part in PARTS["cuda"]]


def part_of(name: str, device: str = "cuda") -> Part:
    return next(part for part in PARTS[device] if part.name == name)


@functools.cache
def planned(name: str, device: str) -> tuple[Request, Plan]:
    """With another text where one is read: nanoGPT's is no part of a clone."""
    part = part_of(name, device)
    words = [word for word in part.words if word != "data=shakespeare"]
    text = ["data=bytes", f"data_path={TEXT}"] if part.sweep in READ else []
    request = load([*words, *text], lambda _: device)
    return request, make_plan(request.config, SUITES)


def test_the_first_slot_holds_the_headline_by_estimate() -> None:
    """At most 400 s, so that 1.3 times as much fits into a slot of 8.5 minutes; no slot holds more than it has time for."""
    lines = list(timetable(PARTS["cuda"], SLOT_S))
    assert [part.name for slot, _, part in lines if slot == 1][:5] == NAMES[:5]
    assert sum(part.estimate_s or 0 for *_, part in lines[:5]) <= FIRST_SLOT_S
    assert PATIENCE > 1.3
    assert sorted(part.name for *_, part in lines) == sorted(NAMES)
    assert all(begins + (part.estimate_s or 0) <= SLOT_S for _, begins, part in lines)


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
        rounds = request.timing.min_rounds
        assert rounds == request.timing.max_rounds >= LEAST_ROUNDS
        assert request.timing.max_seconds >= rounds * request.timing.block_ms / 1000
        assert not request.config["warm_compile"], "cold only"
        if name != "compiled_torchao":
            assert request.timing.block_ms > 1000 * METERED_S


def test_the_loss_is_that_of_the_published_setting() -> None:
    """Oracle: karpathy/nanoGPT, config/train_shakespeare_char.py."""
    _, plan = planned("nanogpt_char", "cuda")
    published = {"model": "nanogpt_char", "batch": 64, "seq": 256, "steps": 5000}
    for case in plan.cases:
        axes = dict(case.case.axes)
        assert {name: axes[name] for name in published} == published
        assert case.arms == ("base", "tensorwise")
    assert "data=shakespeare" in part_of("nanogpt_char").words
    assert len({case.case["seed"] for case in plan.cases}) >= MIN_SEEDS
    assert len({case.case["seed"] for case in planned("nanogpt_char", "cpu")[1].cases}) >= MIN_SEEDS


def test_a_word_of_the_rehearsal_takes_the_place_of_the_one_with_its_key() -> None:
    gpu, cpu = part_of("casts").words, part_of("casts", "cpu").words
    assert "axes.M=[16384]" in gpu
    assert "axes.M=[256]" in cpu
    assert "axes.M=[16384]" not in cpu
