"""verify on two gloo processes: planted faults of gathers, and ranks that are silent, raise or disprove.

Oracle: the same step without the fault, against which no rank reports anything.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
import verify_workers as workers

from fp8core.verify.ranks import Ranks
from fp8core.verify.shared_weights import checksum
from harness.machine import ranks


@cache
def answers() -> list[dict[str, Any]]:
    return ranks.run(workers.told, 2)


@pytest.mark.parametrize("name", workers.GATHER_FAULTS)
def test_codes_that_are_gathered_wrongly_are_no_proof(name: str) -> None:
    """Every rank says so: of its own codes, or of what another rank reports."""
    for rank in answers():
        without, planted = rank["gathers"][name]
        assert not without
        assert any("gathered" in problem for problem in planted), planted


def test_faults_of_a_gather_are_named_by_the_rank_that_received_them() -> None:
    first, second = (rank["gathers"]["one code changed"][1] for rank in answers())
    assert any("gathered input: codes of rank 1" in line for line in first), first
    assert all(line.startswith("rank 0: ") for line in second), second


@pytest.mark.parametrize("name", workers.WEIGHT_FAULTS)
def test_ranks_that_compute_with_different_weights_are_no_proof(name: str) -> None:
    for rank in answers():
        without, planted, compared = rank["weights"][name]
        assert not without
        assert compared == 1
        assert any("weight" in problem for problem in planted), planted


def test_a_weight_is_alike_only_where_every_rank_of_its_group_read_it() -> None:
    """Oracle: what the other rank has said: the same, another one, nothing of one layer."""
    mine = Ranks()
    mine.rank, mine.size, mine.prefix = 0, 2, ""
    mine.store = create_autospec(dist.Store, instance=True)
    mine.store.get.return_value = json.dumps(["", {"same": [[0, 1], 7], "other": [[0, 1], 8]}]).encode()
    mine.weights = dict.fromkeys(("same", "other", "not called"), ((0, 1), 7))
    (problem,) = mine.problems(1.0)
    assert "other" in problem
    assert mine.alike == {"same"}


def test_a_checksum_knows_a_matrix_from_its_transpose() -> None:
    x = torch.randn(32, 32)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(x.t())
    assert checksum(x) != checksum(x.flip(0))


def test_a_rank_that_does_not_answer_is_named() -> None:
    ok, line = answers()[0]["silent"]
    assert not ok
    assert "rank 1 did not answer" in line


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    """The exception passes through on its own rank."""
    (ok, line), (_, error) = (rank["raising"] for rank in answers())
    assert not ok
    assert "rank 1: raised ArithmeticError" in line
    assert error == "no data\nfor this rank"


def test_a_rank_that_disproves_is_named() -> None:
    (ok, line), (other_ok, other) = (rank["disproving"] for rank in answers())
    assert not ok
    assert not other_ok
    assert line.startswith("FP8 NOT verified: rank 1: 1 of 1 converted layers are emulated"), line
    assert "rank 1" not in other
