"""A job and its groups. Oracle: GPUs dealt out one by one."""

from __future__ import annotations

from typing import Any

import pytest

from harness.advise.scale.job import ClusterJob
from harness.machine.communication import Group
from harness.store.errors import UsageError


def job(**changes: Any) -> ClusterJob:
    return ClusterJob(**{"model": "llama_tiny", "gpu": "h100", "world": 64, "batch": 1, "seq": 64, **changes})


@pytest.mark.parametrize(
    ("world", "tp", "replicas", "node"),
    [(64, 1, 1, 8), (64, 8, 1, 8), (64, 2, 4, 8), (64, 4, 16, 4), (16, 1, 4, 4)],
)
def test_every_gpu_is_in_one_group_of_each_kind(world: int, tp: int, replicas: int, node: int) -> None:
    """Neighbours split layers, then come shards, then copies."""
    one = job(world=world, tp=tp, replicas=replicas, node=node)
    gpus = {
        (c, s, t): (c * one.shard + s) * tp + t
        for c in range(replicas)
        for s in range(one.shard)
        for t in range(tp)
    }
    assert sorted(gpus.values()) == list(range(world))
    nodes = {
        "tp": {gpus[0, 0, t] // node for t in range(tp)},
        "shard": {gpus[0, s, 0] // node for s in range(one.shard)},
        "replicas": {gpus[c, 0, 0] // node for c in range(replicas)},
    }
    sizes = {"tp": tp, "shard": one.shard, "replicas": replicas}
    assert one.groups == {name: Group(sizes[name], len(nodes[name])) for name in sizes}
    assert one.dp * tp == world


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world": 0}, "world=0: expected an integer of at least 1"),
        ({"world": 70000}, "world=70000: expected at most 65536"),
        ({"world": 12, "tp": 8}, "world=12 is no multiple of tp x replicas = 8 x 1; the nearest is 16"),
        ({"world": 10, "replicas": 4}, "no multiple of tp x replicas = 1 x 4; the nearest is 8"),
        ({"tp": 3, "world": 48}, "tp=3 does not divide the 8 GPUs of a node"),
        ({"tp": 16}, "tp=16 does not divide the 8 GPUs of a node"),
        ({"weights": "fp64"}, "unknown weights 'fp64'"),
        ({"reduce": "fp8"}, "unknown reduce 'fp8'"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.split(";")[0].replace("(", r"\(")):
        job(**changes)
