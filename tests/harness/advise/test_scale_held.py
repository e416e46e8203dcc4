"""What a GPU of a job holds. Oracles: parameters counted one by one, and sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8core import RECIPES
from harness.advise.scale.held import Block, at_work, kept, memory
from harness.machine.communication import GpuGroup
from harness.store.errors import UsageError
from harness.training import meta_estimate
from harness.training.setup import Setup
from harness.training.step import Step


def test_activations_of_all_blocks_from_those_of_two() -> None:
    """Eager, against the prediction for the whole model, of a model of four blocks."""
    found = memory(Setup("nanogpt_char_cpu", 4, 64))
    whole = meta_estimate.memory(Setup("nanogpt_char_cpu", 4, 64, compute="bf16"), "cpu")
    assert found["activations"] == whole["activations"]
    assert found["logits"] == whole["logits"]
    assert found["workspace"] == whole["workspace"]


def test_an_eager_head_that_is_left_out_keeps_no_codes() -> None:
    """By hand: a byte for each element of its weight and of its input, and two scales, in the place of the input in bf16."""
    tokens, width, vocabulary = 2 * 64, 768, 32_000
    fp8 = Setup("llama_125m", 2, 64, recipe=RECIPES["tensorwise"])
    of_all, without_head = (memory(job)["activations"] for job in (fp8, replace(fp8, left_out=("head",))))
    codes, scales, in_bf16 = (vocabulary + tokens) * width, 2 * 4, 2 * tokens * width
    assert of_all - without_head == codes + scales - in_bf16


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


@pytest.mark.parametrize(
    ("dp", "tp", "replicas", "node"),
    [(64, 1, 1, 8), (8, 8, 1, 8), (32, 2, 4, 8), (16, 4, 16, 4), (16, 1, 4, 4)],
)
def test_every_gpu_is_in_one_group_of_each_kind(dp: int, tp: int, replicas: int, node: int) -> None:
    """Neighbours split layers, then come shards, then copies."""
    one = Step(dp=dp, tp=tp, replicas=replicas, node=node)
    gpus = np.arange(dp * tp).reshape(replicas, one.shards, tp)
    lines = {"tp": gpus[0, 0, :], "shard": gpus[0, :, 0], "replicas": gpus[:, 0, 0]}
    assert one.groups == {name: GpuGroup(line.size, len({*(line // node)})) for name, line in lines.items()}
    assert one.world == dp * tp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp": 0}, "dp=0: expected an integer of at least 1"),
        ({"dp": 10, "replicas": 4}, "dp=10 is no multiple of replicas=4; the nearest is 8"),
        ({"tp": 3}, "tp=3 does not divide the 8 GPUs of a node"),
        ({"tp": 16}, "tp=16 does not divide the 8 GPUs of a node"),
        ({"virtual": 2}, "the interleaved schedule is one of a pipeline"),
        ({"compute": "fp64"}, "unknown compute 'fp64'"),
        ({"reduce": "fp8"}, "unknown reduce 'fp8'"),
        ({"checkpointing": "most"}, "unknown checkpointing 'most'"),
    ],
)
def test_steps_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Step(**changes)
