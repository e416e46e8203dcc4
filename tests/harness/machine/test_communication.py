"""What a collective costs. Oracles: NCCL's own formula worked out by hand, and rings walked step by step."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.machine.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ROUNDS,
    GpuGroup,
    latency,
    seconds,
    small_all_reduce,
)

LINK, NET = 360e9, 40e9


def test_nccl_s_formula_by_hand() -> None:
    """16 GPUs on 2 nodes: 14 steps of 3.4 us and one of 14 us after 8.4 us; an all-reduce goes round twice."""
    two = GpuGroup(16, 2)
    assert latency(ALL_GATHER, two) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)
    assert latency(ALL_REDUCE, two) == pytest.approx(8.4e-6 + 2 * (14 * 3.4e-6 + 14e-6))
    moved = 1e9 * 15 / 16 / min(LINK, 8 * NET)
    assert seconds(REDUCE_SCATTER, 1e9, two, LINK, NET) == pytest.approx(latency(REDUCE_SCATTER, two) + moved)
    assert seconds(REDUCE_SCATTER, 1e9, two, LINK, NET, calls=5) == pytest.approx(
        5 * latency(REDUCE_SCATTER, two) + moved
    )


def test_one_gpu_sends_nothing() -> None:
    alone = GpuGroup(1, 1)
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
    group = GpuGroup.of(size, 1, node)
    now = seconds(kind, payload, group, LINK, net)
    assert now > 0
    assert seconds(kind, 2 * payload, group, LINK, net) >= now
    assert seconds(kind, payload, GpuGroup.of(2 * size, 1, node), LINK, net) >= now
    assert seconds(kind, payload, group, LINK, 2 * net) <= now


@pytest.mark.parametrize(("size", "nodes"), [(0, 1), (2, 0), (2, 3)])
def test_groups_that_cannot_be(size: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=f"{size} GPUs on {nodes} nodes; expected 1 to {size} nodes"):
        GpuGroup(size, nodes)
