"""The stages of a GPU session. Oracle: the plan itself, which knows every key, axis, arm and the length of a model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from harness.config import Request, load
from harness.gpu_stages import STAGES, Stage
from harness.plan import Plan, make_plan
from harness.suites import SUITES
from harness.timing_session import METERED_S

SLOT, ALL = 9, 25
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


def test_they_fit_in_25_minutes_and_each_that_must_not_be_cut_in_one_slot() -> None:
    assert sum(stage.minutes for stage in STAGES) <= ALL
    assert max(stage.minutes for stage in STAGES) <= SLOT
    assert len({stage.packed for stage in SWEEPS}) + len(("report.html", "report.md", "tests.txt")) <= 8
    assert len({stage.name for stage in STAGES}) == len(STAGES)


@pytest.mark.parametrize("stage", SWEEPS, ids=lambda stage: stage.name)
def test_a_rehearsal_is_a_plan_with_something_to_run_on_a_cpu(stage: Stage) -> None:
    _, plan = planned(stage, "cpu")
    arms = [arm for case in plan.cases for arm in case.runnable]
    assert 0 < len(arms) <= 40
    assert not any(arm.endswith("_compile") for arm in arms)
    assert {case.suite for case in plan.cases} == {case.suite for case in planned(stage, "cuda")[1].cases}


@pytest.mark.parametrize("stage", SWEEPS, ids=lambda stage: stage.name)
def test_a_stage_is_a_command_that_the_plan_accepts(stage: Stage) -> None:
    request, plan = planned(stage, "cuda")
    assert plan.cases
    if stage.whole:
        (case,) = plan.cases
        assert stage.words[1] == f"model={case.case['model']}"
        assert request.timing.block_ms > 1000 * METERED_S
        assert request.timing.max_seconds >= request.timing.min_rounds * request.timing.block_ms / 1000


def test_the_loss_is_that_of_the_published_setting() -> None:
    """Oracle: karpathy/nanoGPT, config/train_shakespeare_char.py, as far as the bar of the summary asks for it."""
    from harness.gpu_summary import NANOGPT
    from harness.verdict.result import MIN_SEEDS

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
    stage = Stage("cast", 1, ("axes.M=[9]", "arms=[a_eager,a_compile]"), ("axes.M=[1]",))
    assert stage.command("cuda") == ["sweep=cast", "axes.M=[9]", "arms=[a_eager,a_compile]"]
    assert {"sweep=cast", "axes.M=[1]", "arms=[a_eager]", "rounds=3"} < set(stage.command("cpu"))
