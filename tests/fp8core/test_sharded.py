"""FSDP2 on two gloo processes: what kept casts, state dicts and `verify` make of weights that come and go.

Oracle of kept casts: the same run without them, bitwise. What ran is in `sharded_worker.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import sharded_worker
import torch

from harness.machine import ranks as launched


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launched.run(sharded_worker.everything, 2)


@pytest.mark.slow
def test_kept_casts_change_no_loss(ranks: list[dict[str, Any]]) -> None:
    """Two optimizer steps of three microbatches each. Where weights stay gathered, casts are kept: two layers, and
    two of three microbatches, twice. Where FSDP frees them, each microbatch casts anew."""
    for rank in ranks:
        for name, (without, kept) in rank["runs"].items():
            assert kept["losses"] == without["losses"], name
            assert kept["gradients"] == without["gradients"], name
            assert kept["hits"] == (0 if name.endswith("True") else 2 * 2 * 2), name
            assert len(set(without["losses"])) == 6
    assert ranks[0]["runs"].keys() == ranks[1]["runs"].keys()
    assert ranks[0]["runs"] != ranks[1]["runs"]  # each trains on data of its own


@pytest.mark.slow
def test_sharded_state_dicts_are_plain_and_load_both_ways(ranks: list[dict[str, Any]]) -> None:
    """Oracle: nn.Linear's state: float32 tensors under its names, beside the amaxes; the whole of it on rank 0."""
    for rank in ranks:
        state = rank["states"]
        assert state["kinds"] == {torch.Tensor}
        assert [key for key in state["keys"] if "amaxes" not in key] == ["0.bias", "0.weight", "2.weight"]
    assert ranks[0]["states"]["same"] == ranks[0]["states"]["loaded"] == [True] * 3


@pytest.mark.slow
def test_verify_sees_through_sharding(ranks: list[dict[str, Any]]) -> None:
    """The layers run in FP8, and the all-gather does not."""
    for rank in ranks:
        assert rank["proof"]["ok"], rank["proof"]["problems"]
        assert list(rank["proof"]["gathered"]) == ["float32"]
        assert rank["proof"]["fp8"][0].startswith("the all-gather is not in FP8")
