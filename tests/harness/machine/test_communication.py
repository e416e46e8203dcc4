"""What a collective costs. Oracles: NCCL's own formula worked out by hand, and rings walked step by step."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.machine.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ROUNDS,
    Group,
    bandwidth,
    latency,
    seconds,
    small_all_reduce,
    wire_bytes,
)

LINK, NET = 360e9, 40e9


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_bytes_of_a_ring(size: int) -> None:
    """Each GPU passes on all of `size` chunks but its own, once; an all-reduce goes round twice."""
    for kind, times in {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2}.items():
        assert wire_bytes(kind, float(size), size) == times * (size - 1)


@pytest.mark.parametrize(
    ("size", "stride", "node", "nodes"),
    [(8, 1, 8, 1), (16, 1, 8, 2), (32, 8, 8, 32), (8, 2, 8, 2), (8, 16, 8, 8)],
)  # fmt: skip
def test_nodes_of_a_group(size: int, stride: int, node: int, nodes: int) -> None:
    """Members counted along the machine: rank r * stride lies on node r * stride // node."""
    assert len({r * stride // node for r in range(size)}) == nodes
    assert Group.of(size, stride, node) == Group(size, nodes)


def test_nccl_s_formula_by_hand() -> None:
    """16 GPUs on 2 nodes: 14 steps of 3.4 us and one of 14 us after 8.4 us; an all-reduce goes round twice."""
    two = Group(16, 2)
    assert latency(ALL_GATHER, two) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)
    assert latency(ALL_REDUCE, two) == pytest.approx(8.4e-6 + 2 * (14 * 3.4e-6 + 14e-6))
    moved = 1e9 * 15 / 16 / min(LINK, 8 * NET)
    assert seconds(REDUCE_SCATTER, 1e9, two, LINK, NET) == pytest.approx(latency(REDUCE_SCATTER, two) + moved)
    assert seconds(REDUCE_SCATTER, 1e9, two, LINK, NET, calls=5) == pytest.approx(
        5 * latency(REDUCE_SCATTER, two) + moved
    )


def test_bandwidth_is_that_of_the_narrowest_place() -> None:
    assert bandwidth(Group(8, 1), LINK, NET) == LINK
    assert bandwidth(Group(64, 8), LINK, NET) == 8 * NET
    assert bandwidth(Group(64, 8), LINK, 2 * NET) == LINK, "network cards of a node outrun its links"
    assert bandwidth(Group(32, 32), LINK, NET) == NET, "one member a node has one card"


def test_one_gpu_sends_nothing() -> None:
    alone = Group(1, 1)
    assert (
        latency(ALL_REDUCE, alone)
        == seconds(ALL_GATHER, 1e9, alone, LINK, NET)
        == small_all_reduce(alone)
        == 0
    )


def test_small_all_reduces_take_a_tree_where_rings_are_long() -> None:
    """8 GPUs: ring 6.6 + 14 x 0.6; 4,096: a tree of 9 levels, since a ring has 8,190 steps."""
    assert small_all_reduce(Group(8, 1)) == pytest.approx(15.0e-6)
    far = 6.8e-6 + 2 * (7 * 0.6e-6 * 1.8 + math.log2(512) * 5e-6)
    assert small_all_reduce(Group(4096, 512)) == pytest.approx(far)
    assert small_all_reduce(Group(4096, 512)) < latency(ALL_REDUCE, Group(4096, 512)) / 100


@given(
    st.sampled_from(sorted(ROUNDS)),
    st.integers(2, 4096),
    st.floats(0, 1e12),
    st.integers(1, 8),
    st.floats(1e9, 1e12),
)
def test_more_is_never_faster(kind: str, size: int, payload: float, node: int, net: float) -> None:
    assume(
        size % node == 0 or 2 * size <= node
    )  # of nodes that are not full, more GPUs may bring more network cards
    group = Group.of(size, 1, node)
    now = seconds(kind, payload, group, LINK, net)
    assert now > 0
    assert seconds(kind, 2 * payload, group, LINK, net) >= now
    assert seconds(kind, payload, Group.of(2 * size, 1, node), LINK, net) >= now
    assert seconds(kind, payload, group, LINK, 2 * net) <= now


@pytest.mark.parametrize(("size", "nodes"), [(0, 1), (2, 0), (2, 3)])
def test_groups_that_cannot_be(size: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=f"{size} GPUs on {nodes} nodes; expected 1 to {size} nodes"):
        Group(size, nodes)
