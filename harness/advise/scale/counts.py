"""Bytes that one GPU gives to each collective of an optimizer step, from the shapes of the parameters alone.

FSDP2 as PyTorch runs it, one group of parameters for each block and one for the rest of the model:

    forward     each group is gathered: every parameter padded along its first dimension to a multiple of the shards,
                in bf16, or in FP8 as bytes where its layer's recipe sends codes
    backward    each block is gathered again; the rest, which the forward pass used last, is still there
    gradients   each group is reduced and scattered, padded likewise
    replicas    (HSDP) each rank's shard of gradients is reduced among the copies
    scales      tensorwise codes need the amax of the whole weight: all amaxes of a step in one all-reduce

Tensor parallelism with sequence parallelism gathers each input of column-parallel layers and scatters each result of
row-parallel ones, and backward the other way round; what is recomputed is exchanged again, but for a block's last
result, where recomputation stops. Held against FSDP2 itself by `harness.advise.scale.observed`. Not counted: the loss and the
norm of the gradients, a few bytes each. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.advise.plan import BYTES
from harness.machine.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, wire_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.advise.model import Exchange
    from harness.advise.scale.job import ClusterJob

BF16, FP8, FP32 = BYTES["bf16"], 1, BYTES["fp32"]
FORWARD, BACKWARD, GRADIENTS = "weights_forward", "weights_backward", "gradients"
COPIES, SCALES = "gradients_copies", "scales"
INPUTS, RESULTS = "activations_gathered", "activations_scattered"


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as one rank of tensor parallelism has it; `fp8`: FSDP sends its FP8 codes."""

    shape: tuple[int, ...]
    fp8: bool = False

    def padded(self, shards: int) -> int:
        """Elements, the first dimension filled up to a multiple of the shards."""
        first, *rest = self.shape or (1,)
        return math.ceil(first / shards) * shards * math.prod(rest)


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of a model: those of one block, how many blocks there are, and those outside of blocks."""

    block: tuple[Weight, ...]
    blocks: int
    rest: tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """What one rank hands to one kind of collective in one optimizer step.

    Attributes:
        part: what for.
        kind: a key of `harness.machine.communication.ROUNDS`.
        group: a key of `ClusterJob.groups`.
        calls: how often.
        payload: bytes that are gathered or reduced, over all calls: the whole, not a rank's share.
    """

    part: str
    kind: str
    group: str
    calls: int
    payload: int

    def given(self, job: ClusterJob) -> int:
        """Bytes that a rank gives: its share of what is gathered, all of what is reduced."""
        return self.payload // (job.groups[self.group].size if self.kind == ALL_GATHER else 1)

    def wire(self, job: ClusterJob) -> float:
        """Bytes that a rank sends, and receives, by a ring."""
        return wire_bytes(self.kind, self.payload, job.groups[self.group].size)


def gathered_bytes(weights: Sequence[Weight], job: ClusterJob) -> int:
    """Bytes of a group of parameters that FSDP gathers."""
    return sum(w.padded(job.shard) * (FP8 if w.fp8 and job.gather_fp8 else BF16) for w in weights)


def reduced_bytes(weights: Sequence[Weight], job: ClusterJob) -> int:
    """Bytes of a group of gradients that FSDP reduces."""
    return sum(w.padded(job.shard) for w in weights) * BYTES[job.reduce]


def sharding(weights: Weights, job: ClusterJob) -> list[Collective]:
    """FSDP2's collectives of one optimizer step; [] on one shard and one copy."""
    n, passes = weights.blocks, job.accumulation
    reductions = passes if job.reduce_each else 1
    block, rest = gathered_bytes(weights.block, job), gathered_bytes(weights.rest, job)
    gradients = n * reduced_bytes(weights.block, job) + reduced_bytes(weights.rest, job)
    found = []
    if job.shard > 1:
        found += [
            Collective(FORWARD, ALL_GATHER, "shard", passes * (n + 1), passes * (n * block + rest)),
            Collective(BACKWARD, ALL_GATHER, "shard", passes * n, passes * n * block),
            Collective(GRADIENTS, REDUCE_SCATTER, "shard", reductions * (n + 1), reductions * gradients),
        ]
    if job.replicas > 1:
        shard = gradients // job.shard
        found.append(Collective(COPIES, ALL_REDUCE, "replicas", reductions * (n + 1), reductions * shard))
    sent = n * sum(w.fp8 for w in weights.block) + sum(w.fp8 for w in weights.rest)
    if sent and job.shard > 1 and job.gather_fp8:
        found.append(Collective(SCALES, ALL_REDUCE, "shard", 1, FP32 * sent))
    return found


def given(collectives: Sequence[Collective], job: ClusterJob) -> dict[str, tuple[int, int]]:
    """Calls and bytes that a rank gives, by kind."""
    found: dict[str, tuple[int, int]] = {}
    for each in collectives:
        calls, size = found.get(each.kind, (0, 0))
        found[each.kind] = calls + each.calls, size + each.given(job)
    return found


def exchanging(exchanges: Sequence[Exchange], blocks: int, job: ClusterJob) -> list[Collective]:
    """Tensor parallelism's collectives of one optimizer step.

    Args:
        exchanges: of one forward pass (`harness.advise.model.split`).
        blocks: how many blocks end in a scattered result.
        job: with "full" checkpointing blocks exchange again.
    """
    if job.tp == 1:
        return []
    coded = FP8 if job.recipe and job.gather_fp8 else BF16
    gathers = sum(e.gathers for e in exchanges)
    scatters = len(exchanges) - gathers
    again = job.checkpointing == "full"
    # Forward, again, and backward, where results' gradients are gathered
    n_in = gathers + again * min(gathers, 2 * blocks) + scatters
    n_out = scatters + again * (scatters - blocks) + gathers
    sent = max((e.sent for e in exchanges), default=0.0)  # tokens x width, all of them
    passes = job.accumulation
    return [
        Collective(INPUTS, ALL_GATHER, "tp", passes * n_in, int(passes * n_in * sent) * coded // BF16),
        Collective(RESULTS, REDUCE_SCATTER, "tp", passes * n_out, int(passes * n_out * sent)),
    ]
