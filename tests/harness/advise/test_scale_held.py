"""What a GPU of a job holds. Oracles: parameters counted one by one, and sums by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.advise.scale.held import Block, at_work, kept, memory
from harness.advise.scale.job import ClusterJob
from harness.machine.communication import Group
from harness.store.errors import UsageError
from harness.training import meta_estimate
from harness.training.setup import Setup


def test_activations_of_all_blocks_from_those_of_two() -> None:
    """Eager, against the prediction for the whole model, of a model of four blocks."""
    one = ClusterJob("nanogpt_char_cpu", "h200", 1, 4, 64, checkpointing="none", compiled=False)
    found = memory(one)
    whole = meta_estimate.memory(Setup("nanogpt_char_cpu", 4, 64, compute="bf16"), "cpu")
    assert found["activations"] == whole["activations"]
    assert found["logits"] == whole["logits"]
    assert found["workspace"] == whole["workspace"]


# Results of its products: q 4, k 2, v 2, o 4, gate 10, up 10, down 4
BLOCK = Block(width=4, q=4, kv=2, up=20, ffn=10, heads=2)
INPUT, PRODUCTS, ATTENTION, NORM_ROWS = 2 * 4, 2 * (4 + 2 + 2 + 4 + 10 + 10), 2 * 4 + 4 * 2, 2 * 4
NORMS_AND_SILU = 2 * (4 + 4 + 10)


@pytest.mark.parametrize(
    ("checkpointing", "recipe", "bytes_kept"),
    [
        ("none", "", INPUT + PRODUCTS + ATTENTION + NORM_ROWS + NORMS_AND_SILU),
        ("none", "rowwise", INPUT + PRODUCTS + ATTENTION + NORM_ROWS + 4),
        ("none", "blockwise", INPUT + PRODUCTS + ATTENTION + NORM_ROWS + 4 + 10),
        ("selective", "", INPUT + PRODUCTS + ATTENTION + NORM_ROWS),
        ("by_op", "", INPUT + 2 * (4 + 2 + 10) + ATTENTION),
        ("full", "", INPUT),
        ("full", "rowwise", INPUT),
    ],
)
def test_what_a_block_keeps(checkpointing: str, recipe: str, bytes_kept: int) -> None:
    assert kept(BLOCK, checkpointing, recipe) == bytes_kept
    gradients, codes = 2 * (2 * 4 + 20 + 10), 2 * (4 + 10) * bool(recipe)
    again = kept(BLOCK, "none", recipe) - bytes_kept
    assert at_work(BLOCK, checkpointing, recipe) == again + gradients + codes


def sixty_four(**changes: Any) -> ClusterJob:
    return ClusterJob(**{"model": "llama_tiny", "gpu": "h100", "world": 64, "batch": 1, "seq": 64, **changes})


@pytest.mark.parametrize(
    ("world", "tp", "replicas", "node"),
    [(64, 1, 1, 8), (64, 8, 1, 8), (64, 2, 4, 8), (64, 4, 16, 4), (16, 1, 4, 4)],
)
def test_every_gpu_is_in_one_group_of_each_kind(world: int, tp: int, replicas: int, node: int) -> None:
    """Neighbours split layers, then come shards, then copies."""
    one = sixty_four(world=world, tp=tp, replicas=replicas, node=node)
    gpus = np.arange(world).reshape(replicas, one.shard, tp)
    lines = {"tp": gpus[0, 0, :], "shard": gpus[0, :, 0], "replicas": gpus[:, 0, 0]}
    assert one.groups == {name: Group(line.size, len({*(line // node)})) for name, line in lines.items()}
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
        sixty_four(**changes)
