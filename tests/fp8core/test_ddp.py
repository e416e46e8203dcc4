"""FP8 under DDP, and torchao's FSDP2 beside fp8core's. What each rank runs is in `ddp_checks.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import ddp_checks
from parallel_models import several
from sharding import Setting

from harness.machine import ranks

SETTINGS = [Setting(recipe, sizes=(32, 64, 32), bias=True) for recipe in ("tensorwise", "rowwise", "delayed")]


@cache
def ran() -> list[dict[str, Any]]:
    return ranks.run(several, 2, {"ddp": (ddp_checks.ddp, (SETTINGS,)), "amax": (ddp_checks.accumulated, ())})


def test_ddp_equals_one_process_that_averages() -> None:
    """Bitwise on two ranks, where a sum has no order. Delayed scaling: the same amaxes on both ranks, those of all data."""
    for rank, results in enumerate(ran()):
        for setting, found in zip(SETTINGS, results["ddp"], strict=True):
            oracle = ddp_checks.trained(setting, [0, 1])
            assert found["losses"] == oracle["losses"][rank::2], setting
            assert found["gradients"] == oracle["gradients"], setting
            assert found["amaxes"] == oracle["amaxes"], setting
            assert bool(found["amaxes"]) == (setting.recipe == "delayed")


def test_amaxes_of_all_microbatches_survive_the_broadcast_of_buffers() -> None:
    """Oracle: the largest input, by hand; where DDP broadcasts `pending`, the last rank's first microbatch is lost. The model
    lies in a wrapper that was made after its conversion, as a LightningModule is."""
    assert [rank["amax"] for rank in ran()] == [64.0, 64.0]
