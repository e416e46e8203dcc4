"""What FSDP2 really hands to its collectives: counted while it runs, on fake tensors in a fake process group or for real.

`observe` counts in the existing process group; `in_fake_group` makes one of any size in this process, which sends
nothing. Both are the oracle of `harness.advise.scale.counts`, which works from shapes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8core.convert import convert_to_float8_training
from fp8core.distributed.wire import Collectives, count_collectives
from fp8core.recipe import RECIPES
from harness.training.models import MODELS
from harness.training.models.common import replace_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from harness.advise.scale.job import ClusterJob

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Seen = dict[str, tuple[int, int]]  # kind of collective -> calls, bytes that this rank gave to them


@contextmanager
def in_fake_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks of which this process is rank 0 and the others do not exist.

    Raises:
        RuntimeError: this process is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already has a process group; count in a separate process")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def observe_fake(job: ClusterJob, blocks: int) -> Seen:
    """Counts one step of a job, its model cut to `blocks`, on fake tensors in a fake process group.

    Args:
        job: without tensor parallelism.
        blocks: that are kept.
    """
    model = MODELS[job.model].build(
        device="meta", layers=blocks, dtype=DTYPES[job.weights], checkpointing=job.checkpointing
    )
    with in_fake_group(job.world):
        mesh = mesh_of(job)  # which reads values, that fake tensors lack
        with FakeTensorMode():
            blank = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in model.parameters()}
            replace_parameters(model, blank)
            tokens = torch.empty(1, 16, dtype=torch.int64)
            return observe(model, mesh, job, (tokens, tokens))


def mesh_of(job: ClusterJob) -> DeviceMesh:
    """Over all ranks: the shards of a copy are neighbours."""
    if job.replicas == 1:
        return init_device_mesh("cpu", (job.shard,))
    return init_device_mesh("cpu", (job.replicas, job.shard), mesh_dim_names=("replicas", "shard"))


def observe(model: nn.Module, mesh: DeviceMesh, job: ClusterJob, batch: tuple[Tensor, ...]) -> Seen:
    """Converts and shards a model over a mesh as a job says, runs the passes of one optimizer step and counts."""
    if job.recipe:
        recipe = RECIPES[job.recipe].with_fp8_all_gather(job.gather_fp8)
        model = convert_to_float8_training(model, config=recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=DTYPES[job.reduce])
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    with count_collectives() as collectives:
        for microbatch in range(job.accumulation):
            if not job.reduce_each:
                sharded.set_requires_gradient_sync(microbatch == job.accumulation - 1)
            sharded(*batch).backward()
    return seen_of(collectives)


def seen_of(collectives: Collectives) -> Seen:
    """Calls and bytes by kind, summed over dtypes."""
    found: Seen = {}
    for each in collectives.sent:
        calls, size = found.get(each.collective, (0, 0))
        found[each.collective] = calls + 1, size + each.size_bytes
    return found
