"""What a collective costs. Oracles: NCCL's own formula worked out by hand, and rings walked step by step."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.machine.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ROUNDS,
    Group,
    latency,
    seconds,
    small_all_reduce,
)

LINK, NET = 360e9, 40e9


def test_one_gpu_sends_nothing() -> None:
    alone = Group(1, 1)
    assert (
        latency(ALL_REDUCE, alone)
        == seconds(ALL_GATHER, 1e9, alone, LINK, NET)
        == small_all_reduce(alone)
        == 0
    )


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
