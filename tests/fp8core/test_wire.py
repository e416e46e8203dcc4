"""Counts of collectives. Oracle: tensors of known size given to each kind of collective, on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import wire_checks
from parallel_models import several

from fp8core.distributed.wire import Sent, count_collectives
from harness.machine import ranks


def test_every_collective_is_counted_with_dtype_and_bytes() -> None:
    """DDP reduces from C++, in the backward pass; the compiled function gathers inside of its graph."""
    tasks = {"each": (wire_checks.one_of_each, ()), "programs": (wire_checks.ddp_and_compiled, ())}
    for found in ranks.run(several, 2, tasks):
        for name, (got, wanted) in found["each"].items():
            assert got == wanted, name
        assert found["programs"] == {
            "ddp": {("all_reduce", "float32"): 4 * (16 * 8 + 8)},
            "compiled": [("all_gather", "float32", 64)],
            "graphs": 1,
        }


def test_blocks_nest_and_end() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with count_collectives() as outer:
            dist.all_reduce(torch.ones(3))
            with count_collectives() as inner:
                dist.all_reduce(torch.ones(5, dtype=torch.int32))
        dist.all_reduce(torch.ones(7))
    finally:
        dist.destroy_process_group()
    assert inner.sent == [Sent("all_reduce", "int32", 20)]
    assert outer.sent == [Sent("all_reduce", "float32", 12), *inner.sent]
    assert (outer.calls["all_reduce", "int32"], outer.of("all_reduce")) == (1, {"float32": 12, "int32": 20})
    assert outer.scale_reductions == 0
