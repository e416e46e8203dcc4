"""Counts of collectives. Oracle: tensors of known size given to each kind of collective, on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import wire_checks

from fp8core.distributed.wire import Sent, count_collectives
from harness.machine import ranks


def test_every_collective_is_counted_with_dtype_and_bytes() -> None:
    for found in ranks.run(wire_checks.one_of_each, 2):
        for name, (got, wanted) in found.items():
            assert got == wanted, name


def test_ddp_and_compiled_code_are_counted() -> None:
    """DDP reduces from C++, in the backward pass; the compiled function gathers inside of its graph."""
    for found in ranks.run(wire_checks.ddp_and_compiled, 2):
        assert found["ddp"] == {("all_reduce", "float32"): 4 * (16 * 8 + 8)}
        assert found["compiled"] == [("all_gather", "float32", 64)]
        assert found["graphs"] == 1


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
