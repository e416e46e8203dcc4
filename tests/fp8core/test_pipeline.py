"""Pipelines of 2 and 4 stages on gloo, GPipe and 1F1B.

Oracle: the same model in one process that takes the same microbatches one after the other. Bitwise: each stage multiplies
the same numbers, and sums gradients in the same order.
"""

from __future__ import annotations

from typing import Any

import pipeline_worker as worker
import pytest

from fp8core import RECIPES, Recipe
from harness.machine import ranks

Found = list[dict[str, Any]]
RECIPE: dict[str, Recipe | None] = {
    "fp32": None,
    "tensorwise": RECIPES["tensorwise"],
    "rowwise": RECIPES["rowwise"].emulated(),
    "delayed": RECIPES["delayed"],
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, Found]:
    """By recipe and schedule; two steps, delayed scaling three."""
    jobs = [(name, schedule) for name in RECIPE for schedule in worker.SCHEDULES]
    answers = ranks.run(
        worker.pipelines, request.param, [(RECIPE[n], s, 3 if n == "delayed" else 2) for n, s in jobs]
    )
    return {f"{n} {s}": [rank[i] for rank in answers] for i, (n, s) in enumerate(jobs)}


@pytest.mark.parametrize("schedule", list(worker.SCHEDULES))
@pytest.mark.parametrize("recipe", list(RECIPE))
def test_equals_one_process_that_takes_the_microbatches(
    found: dict[str, Found], recipe: str, schedule: str
) -> None:
    """Losses of all microbatches of all steps and gradients of all parameters, bit for bit."""
    stages = found[f"{recipe} {schedule}"]
    assert len(stages[-1]["losses"][0]) == worker.MICROBATCHES
    for stage in stages:
        assert stage["losses"] == stage["wanted"]
        assert set(stage["gradients"].values()) == {0.0}


def test_delayed_amaxes_are_those_of_one_process(found: dict[str, Found]) -> None:
    """Pending amaxes are maxima, so the order of microbatches is nothing to them. Gradients are divided by the number of
    microbatches after the backward passes, so their amaxes, and scales, are that much larger."""
    for schedule in worker.SCHEDULES:
        for stage in found[f"delayed {schedule}"]:
            ours, theirs = stage["amaxes"]
            assert len(ours) == len(theirs) > 0
            for (x, w, g), (x1, w1, g1) in zip(ours, theirs, strict=True):
                assert (x, w, g) == (x1, w1, worker.MICROBATCHES * g1)
                assert min(x, w, g) > 0


def test_stages_must_not_share_amaxes() -> None:
    """Layers of two stages are different layers: update_scales over all ranks says so."""
    for told in ranks.run(worker.shared_by_stages, 2):
        assert "not the same layers on all ranks" in told
        assert "pass group=" in told
