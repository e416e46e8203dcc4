"""Counts of collectives. Oracle: tensors of known size given to each kind of collective, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fp8core.proof.wire import Sent, count_collectives


@on_ranks(2)
def test_every_collective_is_counted_with_dtype_and_bytes() -> None:
    rank, group, mesh = dist.get_rank(), dist.group.WORLD, init_device_mesh("cpu", (2,))
    x, wide = torch.ones(6, dtype=torch.bfloat16), torch.ones(8, dtype=torch.int32)
    sharded = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
    calls: tuple[tuple[Any, Sent], ...] = (
        (lambda: dist.all_gather([torch.empty_like(x)] * 2, x), Sent("all_gather", "bfloat16", 12)),
        (lambda: dist.all_reduce(wide), Sent("all_reduce", "int32", 32)),
        (lambda: dist.broadcast(wide, 0), Sent("broadcast", "int32", 32)),
        (lambda: functional.all_reduce(wide, "sum", group).sum(), Sent("all_reduce", "int32", 32)),
        (
            lambda: functional.reduce_scatter_tensor(wide, "sum", 0, group).sum(),
            Sent("reduce_scatter", "int32", 32),
        ),
        (lambda: dist.all_to_all_single(torch.empty_like(wide), wide), Sent("all_to_all", "int32", 32)),
        (
            lambda: sharded.redistribute(mesh, [Replicate()]).to_local().sum(),
            Sent("all_gather", "float32", 48),
        ),
        (
            lambda: (dist.recv if rank else dist.send)(wide, 1 - rank),
            Sent("recv" if rank else "send", "int32", 32),
        ),
    )
    for call, wanted in calls:
        with count_collectives() as counts:
            call()
        assert counts.sent == [wanted]


@on_ranks(2)
def test_ddp_and_compiled_functions() -> None:
    """DDP reduces from C++, in the backward pass; the compiled function gathers inside of its one graph."""
    model = DistributedDataParallel(nn.Linear(16, 8))
    with count_collectives() as counts:
        model(torch.ones(4, 16)).sum().backward()
    assert counts.of("all_reduce") == {"float32": 4 * (16 * 8 + 8)}

    @torch.compile(backend="eager", fullgraph=True)
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(x * 2, 0, dist.group.WORLD) + 1

    with count_collectives() as counts:
        gathered(torch.ones(16))
    assert counts.sent == [Sent("all_gather", "float32", 64)]


@on_ranks(1)
def test_blocks_nest_and_end() -> None:
    with count_collectives() as outer:
        dist.all_reduce(torch.ones(3))
        with count_collectives() as inner:
            dist.all_reduce(torch.ones(5, dtype=torch.int32))
    dist.all_reduce(torch.ones(7))
    assert inner.sent == [Sent("all_reduce", "int32", 20)]
    assert outer.sent == [Sent("all_reduce", "float32", 12), *inner.sent]
    assert (outer.calls["all_reduce", "int32"], outer.of("all_reduce")) == (1, {"float32": 12, "int32": 20})
    assert outer.scale_reductions == 0
    assert all(row.sent for row in outer.rows), "what made the tensors is not kept for as long as it counts"
