"""Bytes at the collectives. Oracles: FSDP2 itself, in real gloo groups and in fake ones; DTensor's tensor parallelism."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp8core.distributed.wire import count_collectives
from harness.advise.model import split
from harness.advise.scale.counts import exchanging, given, sharding
from harness.advise.scale.held import weights_of
from harness.advise.scale.job import ClusterJob
from harness.advise.scale.observed import Seen, in_fake_group, mesh_of, observe, observe_fake, seen_of
from harness.advise.trace import trace
from harness.machine import ranks
from harness.machine.communication import ALL_GATHER, REDUCE_SCATTER
from harness.training.models import MODELS
from harness.training.models.common import replace_parameters

BLOCKS = 2


def job(world: int, **changes: Any) -> ClusterJob:
    return replace(ClusterJob("llama_tiny", "h100", world, 1, 64, checkpointing="none"), **changes)


def counted(one: ClusterJob) -> Seen:
    """What shapes say."""
    weights = replace(weights_of(one.model, one.recipe, 1), blocks=BLOCKS)
    return given(sharding(weights, one), one)


REAL = [
    {},
    {"accumulation": 2},
    {"accumulation": 2, "reduce_each": True, "reduce": "bf16", "weights": "bf16"},
    {"checkpointing": "full"},
    {"recipe": "tensorwise", "accumulation": 2},
]


def observed_for_real(jobs: list[ClusterJob]) -> list[Seen]:
    """Runs in each rank of a gloo group: values, processes and wires are real."""
    found = []
    for one in jobs:
        dtype = torch.float32 if one.weights == "fp32" else torch.bfloat16
        model = MODELS[one.model].build(layers=BLOCKS, dtype=dtype, checkpointing=one.checkpointing)
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        found.append(observe(model, mesh_of(one), one, (tokens, tokens)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_shapes_say_what_fsdp2_sends_over_gloo(world: int) -> None:
    jobs = [job(world, **changes) for changes in REAL]
    if world == 4:
        jobs.append(job(world, replicas=2, accumulation=2))
    for seen in ranks.run(observed_for_real, world, jobs):
        assert seen == [counted(one) for one in jobs]


@pytest.mark.parametrize(
    "one",
    [
        *(job(world) for world in (8, 7, 100)),
        job(16, replicas=4, accumulation=3, reduce_each=True),
        job(12, replicas=3, reduce="bf16"),
        job(16, model="llama_7b", accumulation=2, checkpointing="full", weights="bf16"),
        job(64, model="llama3_8b", replicas=8),
        *(job(world, recipe="tensorwise") for world in (2, 7, 16)),
        job(8, recipe="rowwise"),
        job(8, replicas=2, recipe="tensorwise"),
        job(8, recipe="tensorwise", gather_fp8=False),
    ],
    ids=lambda one: f"{one.model}-{one.world}-{one.replicas}-{one.recipe}-{one.gather_fp8}",
)
def test_shapes_say_what_fsdp2_sends_in_a_fake_group(one: ClusterJob) -> None:
    """Larger worlds than this machine could hold; real widths; uneven shards; codes of a byte each, and recipes without."""
    assert observe_fake(one, BLOCKS) == counted(one)


def tensor_parallel(blocks: int, checkpointing: str) -> Seen:
    """PyTorch's own tensor and sequence parallelism over two fake ranks."""
    model: Any = MODELS["llama_tiny"].build(
        device="meta", layers=blocks, dtype=torch.bfloat16, checkpointing=checkpointing
    )
    with in_fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode():
            replace_parameters(
                model, {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in model.parameters()}
            )
            for layer in model.layers:
                parallelize_module(layer, mesh, dict(copy.deepcopy(PLAN)))
            ends = {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            parallelize_module(model, mesh, ends)
            tokens = torch.empty(1, 64, dtype=torch.int64)
            with count_collectives() as collectives:
                model(tokens, tokens).backward()
            return seen_of(collectives)


PLAN = {
    "attention_norm": SequenceParallel(),
    "ffn_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "ffn.gate": ColwiseParallel(),
    "ffn.up": ColwiseParallel(),
    "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_block_exchanges_what_dtensor_exchanges(checkpointing: str) -> None:
    """One block more, against one block more: embedding, head and loss are the same in both."""
    one, two = (tensor_parallel(blocks, checkpointing) for blocks in (1, 2))

    def due(blocks: int) -> Seen:
        spec = replace(MODELS["llama_tiny"], config=replace(MODELS["llama_tiny"].config, layers=blocks))
        _, exchanges = split(trace(spec, 1, 64), 2)
        split_job = job(2, tp=2, checkpointing=checkpointing)
        return given(exchanging(exchanges, blocks, split_job), split_job)

    few, more = due(1), due(2)

    def grown(small: Seen, large: Seen) -> dict[str, tuple[int, int]]:
        return {kind: (large[kind][0] - small[kind][0], large[kind][1] - small[kind][1]) for kind in few}

    assert set(few) == {ALL_GATHER, REDUCE_SCATTER}
    assert grown(one, two) == grown(few, more)


def test_activations_in_fp8_are_gathered_at_half() -> None:
    _, exchanges = split(trace(MODELS["llama_tiny"], 1, 64), 2)
    one = job(2, tp=2, recipe="tensorwise")
    bf16 = exchanging(exchanges, BLOCKS, replace(one, gather_fp8=False))
    fp8 = exchanging(exchanges, BLOCKS, one)
    assert [c.payload for c in bf16] == [2 * fp8[0].payload, fp8[1].payload]
    assert exchanging(exchanges, BLOCKS, job(2)) == []
