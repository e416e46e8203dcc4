"""FSDP2 x TP, and FSDP2 x TP x PP on eight processes of gloo.

Oracle: one process that takes the microbatches of all replicas one after the other. Bound 1e-6, relative, for losses and
the gradient of every parameter: codes are equal, sums of float32 are in another order (TP adds parts, FSDP replicas).
"""

from __future__ import annotations

import dataclasses

import pipeline_worker as worker
import pytest
import torch
from on_ranks import on_ranks
from parallel_models import blocks, gradients, relative
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from fp8core import RECIPES, audit
from fp8core.distributed.weight_gather import NOT_ASKED

BOUND = 1e-6


def assert_close(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """The gradients of two blocks."""
    assert len(found) == 2 * 8
    for name, grad in found.items():
        assert relative(grad, want[name]) <= BOUND, name


@pytest.mark.parametrize("fp8_all_gather", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@on_ranks(4)
def test_fsdp_and_tp(name: str, fp8_all_gather: bool) -> None:
    """2 x 2; the first step, in which delayed scales are dynamic. A part of a weight is gathered as FP8 codes too, by the
    scale of the whole weight."""
    recipe = dataclasses.replace(RECIPES[name], fp8_all_gather=fp8_all_gather)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    model = blocks(2, recipe)
    worker.cut_and_sharded(model, mesh)
    x, target = worker.batch(0, replica)
    loss = mse_loss(model(x), target)
    loss.backward()
    want = worker.one_process(recipe, 2, 1, replicas=2, microbatches=1)
    assert loss.item() == pytest.approx(want["losses"][0][replica][0], rel=BOUND)
    assert_close(gradients(model), want["gradients"])
    gathered = {layer.all_gather for layer in audit(model).layers}
    assert gathered == {"fp8" if fp8_all_gather else NOT_ASKED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "steps"),
    [("tensorwise", "1f1b", 2), ("tensorwise", "gpipe", 1), ("delayed", "1f1b", 3)],
)
@on_ranks(8)
def test_fsdp_tp_and_pp(name: str, schedule: str, steps: int) -> None:
    """2 x 2 x 2, converted, then cut, then sharded, then staged."""
    recipe = RECIPES[name]
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = worker.own_blocks(recipe, 4, index, 2)
    worker.cut_and_sharded(model, mesh)
    stage = worker.stage_of(model, index, 2, mesh["pp"].get_group())
    together = mesh["dp", "tp"]._flatten("stage").get_group()
    found = worker.scheduled(schedule, stage, model, steps, replica, together)
    want = worker.one_process(recipe, 4, steps, replicas=2)
    assert_close(found["gradients"], want["gradients"])
    if stage.is_last:
        for got, replicas in zip(found["losses"], want["losses"], strict=True):
            assert got == pytest.approx(replicas[replica], rel=BOUND)
    for (x, w, g), (x1, w1, g1) in zip(found["amaxes"], worker.own_amaxes(want, stage), strict=True):
        assert [x, w] == pytest.approx([x1, w1], rel=BOUND)
        # divided by microbatches and by replicas after the backward passes, which the reference does before
        assert g == pytest.approx(worker.MICROBATCHES * 2 * g1, rel=BOUND)
