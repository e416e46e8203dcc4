"""What ranks send before links are timed. Oracle: results made by hand from what each rank sends, and faults planted in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.machine import link_check
from harness.machine.links import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND, Members
from harness.suites.links import MOST

N = 3 * 4096
THREE = Members((0, 1, 2))
MESSAGE = Members((1, 0), directed=True)


def from_rank(rank: int, operation: str, members: Members = THREE, n: int = N) -> Tensor:
    data = torch.empty(n)
    link_check.fill(data, operation, members, rank)
    return data


def received(operation: str, members: Members, rank: int) -> Tensor:
    """What a network without a fault gives."""
    ranks = members.ranks
    if operation == SEND:
        return from_rank(ranks[0], SEND, members)
    if operation == ALL_GATHER:
        return torch.cat([from_rank(r, ALL_GATHER, members, N // len(ranks)) for r in ranks])
    total = torch.stack([from_rank(r, operation, members).double() for r in ranks]).sum(0).float()
    return total if operation == ALL_REDUCE else total.view(len(ranks), -1)[ranks.index(rank)]


RECEIVERS = [
    (SEND, MESSAGE, 0),
    *(
        (operation, THREE, rank)
        for operation in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
        for rank in range(3)
    ),
    (REDUCE_SCATTER, Members((1, 3)), 3),
]


@pytest.mark.parametrize(("operation", "members", "rank"), RECEIVERS)
@pytest.mark.parametrize("piece", [link_check.PIECE, 1000, 4096])
def test_what_arrives_as_it_was_sent_is_right(
    monkeypatch: pytest.MonkeyPatch, operation: str, members: Members, rank: int, piece: int
) -> None:
    whole = received(operation, members, rank)
    monkeypatch.setattr(link_check, "PIECE", piece)
    assert link_check.wrong(whole, operation, members, rank) == ""
    assert torch.equal(received(operation, members, rank), whole)


def test_one_element_is_counted() -> None:
    got = received(ALL_REDUCE, THREE, 1)
    got[N - 1] += 1
    said = link_check.wrong(got, ALL_REDUCE, THREE, 1)
    assert said == f"all_reduce of ranks 0-1-2: 1 of {N} elements arrived wrong at rank 1"


def sums(*weights: float) -> Tensor:
    return sum((w * from_rank(r, ALL_REDUCE) for r, w in enumerate(weights)), torch.zeros(N))


shards = received(ALL_GATHER, THREE, 0).view(3, -1)
message = received(SEND, MESSAGE, 0)
FAULTS = {
    "a part thrice": (ALL_REDUCE, THREE, sums(0, 3, 0)),
    "a part twice, another missing": (ALL_REDUCE, THREE, sums(2, 1, 0)),
    "a part missing": (ALL_REDUCE, THREE, sums(1, 1, 0)),
    "own part alone": (ALL_REDUCE, THREE, sums(1, 0, 0)),
    "ranks swapped": (ALL_GATHER, THREE, shards[[1, 0, 2]].flatten()),
    "a shard twice": (ALL_GATHER, THREE, shards[[0, 1, 1]].flatten()),
    "another shard of the sum": (REDUCE_SCATTER, THREE, received(REDUCE_SCATTER, THREE, 1)),
    "shifted by one": (SEND, MESSAGE, message.roll(1)),
    "shifted by 251": (SEND, MESSAGE, message.roll(251)),
    "shifted by 4096": (SEND, MESSAGE, message.roll(4096)),
    "a page twice": (SEND, MESSAGE, message[:4096].repeat(3)),
    "the other direction": (SEND, MESSAGE, received(SEND, Members((0, 1), directed=True), 1)),
    "another pair's message": (SEND, MESSAGE, received(SEND, Members((1, 2), directed=True), 2)),
    "an earlier operation": (REDUCE_SCATTER, THREE, received(ALL_REDUCE, THREE, 0)[: N // 3]),
    "nothing": (SEND, MESSAGE, torch.zeros(N)),
    "not a number": (SEND, MESSAGE, message * torch.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_arrives_otherwise_is_wrong_nearly_everywhere(fault: str) -> None:
    """Numbers that go up by place repeat after 251 places, and three times the middle rank's are the sum of three."""
    operation, members, got = FAULTS[fault]
    bad = int(link_check.wrong(got, operation, members, 0).split(": ")[1].split(" of ")[0])
    # 2/3 where one of three parts is in its place; by chance an element is right once in 2**19
    assert bad >= len(got) * (0.33 if fault == "a shard twice" else 0.66) * 0.99


def test_sums_of_the_most_ranks_are_exact_in_float32() -> None:
    assert MOST * (2**link_check.BITS - 1) < 2**24
    every = Members(tuple(range(MOST)))
    parts = torch.stack([from_rank(rank, ALL_REDUCE, every) for rank in range(MOST)])
    assert parts.min() >= 0
    assert parts.max() < 2**link_check.BITS
    exact = parts.double().sum(0)
    for order in (parts, parts.flip(0), parts[torch.randperm(MOST)]):
        total = torch.zeros(N)
        for part in order:
            total += part
        assert torch.equal(total.double(), exact)


def test_numbers_are_spread_evenly_and_ranks_share_none_but_by_chance() -> None:
    one, other = (from_rank(rank, SEND, MESSAGE, 2**20) for rank in (0, 1))
    assert float(one.mean()) == pytest.approx(2**18, rel=5e-3)
    # of 2**20 numbers of 2**19 values each is met by 1 - exp(-2) of them
    assert len(torch.unique(one)) / 2**19 == pytest.approx(0.8647, abs=0.01)
    assert int((one == other).sum()) < 20
