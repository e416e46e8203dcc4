"""What FSDP2 really hands to its collectives: counted while it runs, on fake tensors in a fake process group or for real.

`observe` counts in whatever process group there is; `in_fake_group` makes one of any size in this process, which sends
nothing. Both are the oracle of `harness.scale.counts`, which works from shapes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from harness.models import MODELS
from harness.models.common import replace_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from harness.scale.job import Job

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Operator -> kind
_KINDS = {
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "allreduce_": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
}
Seen = dict[tuple[str, int], tuple[int, int]]  # kind, group size -> calls, bytes of the whole


class Collectives(TorchDispatchMode):
    """Counts the collectives within the block: calls and bytes of what is gathered or reduced, by kind and group size."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[str, int]] = Counter()
        self._bytes: Counter[tuple[str, int]] = Counter()

    @property
    def seen(self) -> Seen:
        """What was counted."""
        return {key: (calls, self._bytes[key]) for key, calls in self._calls.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func.overloadpacket.__name__)
        if kind is not None and func.namespace in ("c10d", "_c10d_functional"):
            given = [leaf for leaf in tree_leaves((args, kwargs or {}, result)) if isinstance(leaf, Tensor)]
            group = _group(args, kwargs)
            key = kind, dist.get_world_size(group)
            self._calls[key] += 1
            # Of shard and whole the whole is the larger
            self._bytes[key] += max(x.numel() * x.element_size() for x in given)
        return result


def _group(args: Any, kwargs: Any) -> Any:
    """The process group among an operator's arguments: boxed, or by its name."""
    for value in tree_leaves((args, kwargs or {})):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            return dist.distributed_c10d._resolve_process_group(value)
    raise ValueError("a collective without a process group")


@contextmanager
def in_fake_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks of which this process is rank 0 and the others do not exist.

    Raises:
        RuntimeError: this process is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; count in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def observe_fake(
    job: Job, blocks: int, convert: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Seen:
    """Counts one step of a job, its model cut to `blocks`, on fake tensors in a fake process group.

    Args:
        job: without tensor parallelism.
        blocks: that are kept.
        convert: to FP8, before sharding.
    """
    dtype = DTYPES[job.weights]
    model = MODELS[job.model].build(
        device="meta", layers=blocks, dtype=dtype, checkpointing=job.checkpointing
    )
    with in_fake_group(job.world):
        mesh = mesh_of(job)  # which reads values, that fake tensors lack
        with FakeTensorMode():
            blank = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in model.parameters()}
            replace_parameters(model, blank)
            tokens = torch.empty(1, 16, dtype=torch.int64)
            return observe(convert(model), mesh, job, (tokens, tokens))


def mesh_of(job: Job) -> DeviceMesh:
    """Over all ranks: the shards of a copy are neighbours."""
    if job.replicas == 1:
        return init_device_mesh("cpu", (job.shard,))
    return init_device_mesh("cpu", (job.replicas, job.shard), mesh_dim_names=("replicas", "shard"))


def observe(model: nn.Module, mesh: DeviceMesh, job: Job, batch: tuple[Tensor, ...]) -> Seen:
    """Shards a model over a mesh as a job says, runs the passes of one optimizer step and counts."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=DTYPES[job.reduce])
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    with Collectives() as collectives:
        for microbatch in range(job.accumulation):
            if not job.reduce_each:
                sharded.set_requires_gradient_sync(microbatch == job.accumulation - 1)
            sharded(*batch).backward()
    return collectives.seen
