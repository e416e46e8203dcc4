"""What the tests of `fp8core.distributed.wire` run in each rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fp8core.distributed.wire import count_collectives


def one_of_each() -> dict[str, tuple[Any, Any]]:
    """(what was counted, what was sent) by kind of call."""
    warnings.simplefilter("ignore")
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (2,))
    x, wide = torch.ones(6, dtype=torch.bfloat16), torch.ones(8, dtype=torch.int32)
    sharded = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])

    def pass_on() -> None:
        if rank == 0:
            dist.send(wide, 1)
        else:
            dist.recv(wide, 0)

    calls: dict[str, tuple[Any, list[tuple[str, str, int]]]] = {
        "all_gather": (
            lambda: dist.all_gather([torch.empty_like(x)] * 2, x),
            [("all_gather", "bfloat16", 12)],
        ),
        "all_reduce": (lambda: dist.all_reduce(wide), [("all_reduce", "int32", 32)]),
        "broadcast": (lambda: dist.broadcast(wide, 0), [("broadcast", "int32", 32)]),
        "functional all_reduce": (
            lambda: functional.all_reduce(wide, "sum", group).sum(),
            [("all_reduce", "int32", 32)],
        ),
        "reduce_scatter": (
            lambda: functional.reduce_scatter_tensor(wide, "sum", 0, group).sum(),
            [("reduce_scatter", "int32", 32)],
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(torch.empty_like(wide), wide),
            [("all_to_all", "int32", 32)],
        ),
        "inside a DTensor": (
            lambda: sharded.redistribute(mesh, [Replicate()]).to_local().sum(),
            [("all_gather", "float32", 48)],
        ),
        "point to point": (pass_on, [("send" if rank == 0 else "recv", "int32", 32)]),
        "nothing": (lambda: x + x, []),
    }
    found = {}
    for name, (call, wanted) in calls.items():
        with count_collectives() as counts:
            call()
        found[name] = ([tuple(each) for each in counts.sent], wanted)
    return found


def ddp_and_compiled() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    model = DistributedDataParallel(nn.Linear(16, 8))
    with count_collectives() as of_ddp:
        model(torch.ones(4, 16)).sum().backward()
    group = dist.group.WORLD
    assert group is not None
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(x * 2, 0, group) + 1

    with count_collectives() as of_compiled:
        gathered(torch.ones(16))
    sent = [tuple(each) for each in of_compiled.sent]
    return {"ddp": dict(of_ddp.bytes), "compiled": sent, "graphs": len(graphs)}
