"""FSDP2 x TP, and FSDP2 x TP x PP on eight processes of gloo.

Oracle: one process that takes the microbatches of all replicas one after the other. Bound 1e-6, relative, for losses and
the gradient of every parameter: codes are equal, sums of float32 are in another order (TP adds parts, FSDP replicas).
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pipeline_worker as worker
import pytest
from parallel_models import several

from fp8core import RECIPES
from fp8core.distributed.weight_gather import NOT_ASKED
from harness.machine import ranks

BOUND = 1e-6
TWO = ("tensorwise", "delayed")


@cache
def in_two_dimensions(fp8_all_gather: bool) -> list[dict[str, Any]]:
    """[rank][recipe], of one launch."""
    tasks = {
        name: (worker.two_dimensions, (dataclasses.replace(RECIPES[name], fp8_all_gather=fp8_all_gather),))
        for name in TWO
    }
    return ranks.run(several, 4, tasks)


@pytest.mark.parametrize("fp8_all_gather", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("recipe", TWO)
def test_fsdp_and_tp(recipe: str, fp8_all_gather: bool) -> None:
    """2 x 2; the first step, in which delayed scales are dynamic. A part of a weight is gathered as FP8 codes too, by the
    scale of the whole weight."""
    for rank in in_two_dimensions(fp8_all_gather):
        errors, gathered = rank[recipe]
        assert len(errors) == 1 + 2 * 8
        assert max(errors.values()) <= BOUND, errors
        assert gathered == {"fp8" if fp8_all_gather else NOT_ASKED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "schedule", "steps"),
    [("tensorwise", "1f1b", 2), ("tensorwise", "gpipe", 1), ("delayed", "1f1b", 3)],
)
def test_fsdp_tp_and_pp(recipe: str, schedule: str, steps: int) -> None:
    """2 x 2 x 2, converted, then cut, then sharded, then staged."""
    ends = 0
    for rank in ranks.run(worker.three_dimensions, 8, RECIPES[recipe], schedule, steps):
        assert len(rank["gradients"]) == 2 * 8
        assert max(rank["gradients"].values()) <= BOUND, rank["gradients"]
        for got, want in zip(rank["losses"], rank["wanted"], strict=True):
            assert got == pytest.approx(want, rel=BOUND)
            ends += len(got)
        for (x, w, g), (x1, w1, g1) in zip(*rank["amaxes"], strict=True):
            assert [x, w] == pytest.approx([x1, w1], rel=BOUND)
            # divided by microbatches and by replicas after the backward passes, which the reference does before
            assert g == pytest.approx(worker.MICROBATCHES * 2 * g1, rel=BOUND)
    assert ends == 4 * steps * worker.MICROBATCHES
