"""Pipelines of 2 and 4 stages on gloo, GPipe and 1F1B.

Oracle: the same model in one process that takes the same microbatches one after the other. Bitwise: each stage multiplies
the same numbers, and sums gradients in the same order.
"""

from __future__ import annotations

import pipeline_worker as worker
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pipeline_worker import MICROBATCHES

from fp8core import RECIPES, update_scales


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
@on_ranks(2)
def test_equals_one_process_that_takes_the_microbatches(name: str, world: int) -> None:
    """Losses of all microbatches of all steps and gradients of all parameters, bit for bit.

    Pending amaxes are maxima, so the order of microbatches is nothing to them. Gradients are divided by the number of
    microbatches after the backward passes, so their amaxes, and scales, are that much larger.
    """
    recipe = RECIPES["rowwise"].emulated() if name == "rowwise" else RECIPES[name]
    rank, steps = dist.get_rank(), 3 if name == "delayed" else 2
    for schedule in worker.SCHEDULES:
        model = worker.own_blocks(recipe, 4, rank, world)
        stage = worker.stage_of(model, rank, world)
        found = worker.scheduled(schedule, stage, model, steps, 0, worker.alone())
        want = worker.one_process(recipe, 4, steps)
        if stage.is_last:
            assert found["losses"] == [replicas[0] for replicas in want["losses"]]
        for parameter, grad in found["gradients"].items():
            assert torch.equal(grad, want["gradients"][parameter]), parameter
        assert bool(found["amaxes"]) == (name == "delayed")
        for (x, w, g), (x1, w1, g1) in zip(found["amaxes"], worker.own_amaxes(want, stage), strict=True):
            assert (x, w, g) == (x1, w1, MICROBATCHES * g1)
            assert min(x, w, g) > 0


@on_ranks(2)
def test_stages_must_not_share_amaxes() -> None:
    """Layers of two stages are different layers: update_scales over all ranks says so."""
    model = worker.own_blocks(RECIPES["delayed"], 2, dist.get_rank(), 2)
    model(worker.batch(0)[0]).sum().backward()
    with pytest.raises(ValueError, match=r"not the same layers on all ranks(?s:.*)pass group="):
        update_scales(model)
