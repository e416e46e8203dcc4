"""What a collective of NCCL costs: an alpha-beta model of NVLink within a node and InfiniBand between nodes.

    large: t = base + (steps within nodes) a_link + (steps between nodes) a_net + rounds S (P - 1)/P / B
    small: t = the better of a ring and a tree by NCCL's low-latency protocol, bytes left out

A ring of P GPUs on n nodes takes P - 1 steps, of which n - 1 go between nodes; an all-reduce goes round twice. S is the
whole that is gathered or reduced. B is the slower of a GPU's link and of what all network cards of a node carry for
this group together, since NCCL lays one ring along each card. Latencies are NCCL's own, by which it chooses between its
algorithms (NVIDIA/nccl, src/graph/tuning.cc, read 2026-11). Bandwidths are the caller's. Pure functions; no torch.

Not in it: switches that reduce (NVLS, SHARP), contention of two collectives, GPUs that wait for the slowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
ROUNDS: Mapping[str, int] = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2}

# Seconds: a ring's start and steps by the protocol for large messages ("Simple").
BASE_S, LINK_HOP_S, NET_HOP_S = 8.4e-6, 3.4e-6, 14.0e-6
# The same for small messages ("LL"): of a ring, of a tree. Across nodes its steps within a node take 1.8 times as long.
_SMALL_RING, _SMALL_TREE = (6.6e-6, 0.6e-6, 2.7e-6), (6.8e-6, 0.6e-6, 5.0e-6)
_SMALL_MIXED = 1.8


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs that take part in one collective.

    Attributes:
        size: how many.
        nodes: on how many nodes; each has the same number of them.
    """

    size: int
    nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.size:
            raise ValueError(f"{self.size} GPUs on {self.nodes} nodes; expected 1 to {self.size} nodes")

    @property
    def per_node(self) -> int:
        """Members on one node, which have a network card each."""
        return math.ceil(self.size / self.nodes)

    @classmethod
    def of(cls, size: int, stride: int, node: int) -> GpuGroup:
        """Group of every `stride`-th GPU, counted along nodes of `node` GPUs.

        >>> GpuGroup.of(32, 8, 8)  # data-parallel GPUs beside tensor parallelism that fills a node
        GpuGroup(size=32, nodes=32)
        >>> GpuGroup.of(16, 1, 4)
        GpuGroup(size=16, nodes=4)
        """
        members = max(1, min(size, node // stride))
        return cls(size, math.ceil(size / members))


def wire_bytes(kind: str, payload: float, size: int) -> float:
    """Bytes that each GPU sends, and receives, of a payload that is gathered or reduced by a ring of `size`."""
    return ROUNDS[kind] * payload * (size - 1) / size


def bandwidth(group: GpuGroup, link: float, network: float) -> float:
    """Bytes/s of a ring, given those of a GPU's links to its node and of one network card."""
    return link if group.nodes == 1 else min(link, network * group.per_node)


def latency(kind: str, group: GpuGroup) -> float:
    """Seconds of a collective of no bytes, by the protocol for large messages."""
    if group.size == 1:
        return 0.0
    between = group.nodes - 1
    return BASE_S + ROUNDS[kind] * ((group.size - 1 - between) * LINK_HOP_S + between * NET_HOP_S)


def seconds(kind: str, payload: float, group: GpuGroup, link: float, network: float, calls: int = 1) -> float:
    """Seconds of `calls` collectives that together carry `payload` bytes, one after the other.

    Args:
        kind: a key of `ROUNDS`.
        payload: bytes of the whole that is gathered or reduced, over all calls.
        group: who takes part.
        link: bytes/s of one GPU to its node, one direction.
        network: bytes/s of one GPU to other nodes, one direction.
        calls: how many there are.
    """
    if group.size == 1:
        return 0.0
    moved = wire_bytes(kind, payload, group.size) / bandwidth(group, link, network)
    return calls * latency(kind, group) + moved


def small_all_reduce(group: GpuGroup) -> float:
    """Seconds of an all-reduce of a few bytes, such as amaxes."""
    if group.size == 1:
        return 0.0
    mixed = _SMALL_MIXED if group.nodes > 1 else 1.0
    base, link, net = _SMALL_RING
    between = group.nodes - 1
    ring = base + 2 * ((group.size - 1 - between) * link * mixed + between * net)
    base, link, net = _SMALL_TREE
    tree = base + 2 * ((group.per_node - 1) * link * mixed + math.log2(group.nodes) * net)
    return min(ring, tree)
