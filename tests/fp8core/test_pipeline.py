"""Pipelines of 2 and 4 stages on gloo, GPipe and 1F1B.

Oracle: the same model in one process that takes the same microbatches one after the other. Bitwise: each stage multiplies
the same numbers, and sums gradients in the same order.
"""

from __future__ import annotations

from typing import Any

import pipeline_worker as worker
import pytest
from parallel_models import several

from fp8core import RECIPES
from harness.machine import ranks

RECIPE = {
    "tensorwise": RECIPES["tensorwise"],
    "rowwise": RECIPES["rowwise"].emulated(),
    "delayed": RECIPES["delayed"],
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """[stage][recipe and schedule], of one launch; two steps, delayed scaling three."""
    tasks: dict[str, Any] = {
        f"{name} {schedule}": (worker.pipeline, (recipe, schedule, 3 if name == "delayed" else 2))
        for name, recipe in RECIPE.items()
        for schedule in worker.SCHEDULES
    }
    return ranks.run(several, request.param, tasks | {"shared": (worker.shared_by_stages, ())})


@pytest.mark.parametrize("schedule", list(worker.SCHEDULES))
@pytest.mark.parametrize("recipe", list(RECIPE))
def test_equals_one_process_that_takes_the_microbatches(
    found: list[dict[str, Any]], recipe: str, schedule: str
) -> None:
    """Losses of all microbatches of all steps and gradients of all parameters, bit for bit."""
    stages = [rank[f"{recipe} {schedule}"] for rank in found]
    assert len(stages[-1]["losses"][0]) == worker.MICROBATCHES
    for stage in stages:
        assert stage["losses"] == stage["wanted"]
        assert set(stage["gradients"].values()) == {0.0}


def test_delayed_amaxes_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    """Pending amaxes are maxima, so the order of microbatches is nothing to them. Gradients are divided by the number of
    microbatches after the backward passes, so their amaxes, and scales, are that much larger."""
    for schedule in worker.SCHEDULES:
        for stage in (rank[f"delayed {schedule}"] for rank in found):
            ours, theirs = stage["amaxes"]
            assert len(ours) == len(theirs) > 0
            for (x, w, g), (x1, w1, g1) in zip(ours, theirs, strict=True):
                assert (x, w, g) == (x1, w1, worker.MICROBATCHES * g1)
                assert min(x, w, g) > 0


def test_stages_must_not_share_amaxes(found: list[dict[str, Any]]) -> None:
    """Layers of two stages are different layers: update_scales over all ranks says so."""
    for rank in found:
        assert "not the same layers on all ranks" in rank["shared"]
        assert "pass group=" in rank["shared"]
