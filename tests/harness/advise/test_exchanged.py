"""Bytes at the collectives. Oracles: FSDP2 and DTensor's tensor parallelism, on fake tensors in a fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8core import RECIPES, Float8LinearConfig, convert_to_float8_training
from fp8core.proof.wire import Collectives, count_collectives
from harness.advise.model import split
from harness.advise.scale.held import gathered_bytes, reduced_bytes, weights_of
from harness.advise.trace import trace
from harness.machine.communication import ALL_GATHER, REDUCE_SCATTER
from harness.training.models import MODELS
from harness.training.models.common import replace_parameters
from harness.training.setup import Setup

BLOCKS = 2


@contextmanager
def fake_ranks(model: Any, world: int) -> Iterator[tuple[DeviceMesh, torch.Tensor]]:
    """A mesh of `world` ranks of which this process is the first and the others do not exist; tokens of that many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))  # reads values, that fake tensors lack
        with FakeTensorMode():
            blank = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in model.parameters()}
            replace_parameters(model, blank)
            yield mesh, torch.empty(1, 64, dtype=torch.int64)
    finally:
        dist.destroy_process_group()


def seen(counts: Collectives, kind: str) -> tuple[int, int]:
    """Calls, and bytes that this rank gave."""
    sent = [each.size_bytes for each in counts.sent if each.collective == kind]
    return len(sent), sum(sent)


@pytest.mark.parametrize(
    ("model", "world", "recipe", "gather_fp8"),
    [
        ("llama_tiny", 8, "", True),
        ("llama_tiny", 7, "tensorwise", True),
        ("llama_tiny", 16, "tensorwise", False),
        ("llama_tiny", 8, "rowwise", True),
        ("llama3_8b", 64, "tensorwise", True),
    ],
)
def test_fsdp_gathers_and_reduces_what_shapes_say(
    model: str, world: int, recipe: str, gather_fp8: bool
) -> None:
    """Larger worlds than this machine could hold, real widths, uneven shards, codes of a byte each, recipes without."""
    cast = RECIPES[recipe] if recipe else None
    job = Setup(model, 1, 64, dp=world, recipe=cast, gather_fp8=gather_fp8)
    one: Any = MODELS[model].build(device="meta", layers=BLOCKS, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_ranks(one, world) as (mesh, tokens):
        if recipe:
            config = replace(
                Float8LinearConfig.from_recipe_name(recipe),
                enable_fsdp_float8_all_gather=gather_fp8 and recipe == "tensorwise",
            )
            convert_to_float8_training(one, config=config)
        for layer in one.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(one, mesh=mesh, mp_policy=policy)
        with count_collectives() as counts:
            one(tokens, tokens).backward()
    weights = weights_of(model, cast, 1)
    block, rest = (gathered_bytes(part, job) for part in (weights.block, weights.rest))
    # The rest, which the forward pass used last, is still there in the backward pass
    assert seen(counts, ALL_GATHER) == (2 * BLOCKS + 1, (2 * BLOCKS * block + rest) // world)
    block, rest = (reduced_bytes(part, job) for part in (weights.block, weights.rest))
    assert seen(counts, REDUCE_SCATTER) == (BLOCKS + 1, BLOCKS * block + rest)


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


def tensor_parallel(blocks: int) -> Collectives:
    """PyTorch's own tensor and sequence parallelism over two fake ranks."""
    model: Any = MODELS["llama_tiny"].build(device="meta", layers=blocks, dtype=torch.bfloat16)
    with fake_ranks(model, 2) as (mesh, tokens):
        for layer in model.layers:
            parallelize_module(layer, mesh, dict(PLAN))
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
        with count_collectives() as counts:
            model(tokens, tokens).backward()
    return counts


def test_a_block_exchanges_what_dtensor_exchanges() -> None:
    """One block more, against one block more: embedding, head and loss are the same in both."""
    real = [tensor_parallel(blocks) for blocks in (1, 2)]
    due = []
    for blocks in (1, 2):
        spec = replace(MODELS["llama_tiny"], config=replace(MODELS["llama_tiny"].config, layers=blocks))
        due.append(split(trace(spec, 1, 64), 2).exchanges)
    for kind, gathers in ((ALL_GATHER, True), (REDUCE_SCATTER, False)):
        (few_calls, few), (calls, more) = (seen(counts, kind) for counts in real)
        # Forward, and backward, where each goes the other way round; of what is gathered a rank gives its half
        ways = [(len(one), sum(e.sent for e in one) / (2 if gathers else 1)) for one in due]
        assert (calls - few_calls, more - few) == (ways[1][0] - ways[0][0], ways[1][1] - ways[0][1])
