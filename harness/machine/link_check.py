"""Link check: what ranks send before links are timed, and whether it arrived.

Every element is a whole number drawn from its rank, its place and the operation, so that a part of the wrong rank, one counted
twice or not at all, a shifted message and bytes of an earlier operation all differ nearly everywhere: an element is right by
chance once in 2**19. Drawn by mixing in 32 bits (xor, multiply, shift), piece by piece, so that a message of a GiB takes a few
MiB beside it and about a second of a CPU.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.machine.links import ALL_GATHER, ALL_REDUCE, SEND, Members

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BITS = 19  # of a number: sums over 32 ranks are whole numbers below 2**24, exact in float32 in any order
PIECE = 2**18  # elements drawn at a time
_FIRST, _SECOND = (
    0x7FEB352D,
    0x2C1B3C6D,
)  # odd, with bits all over; the second's product is read from its upper half


def fill(data: Tensor, operation: str, members: Members, rank: int) -> None:
    """Writes what a rank sends into `data` [n] float32."""
    for start, stop in _pieces(len(data)):
        data[start:stop] = _numbers(operation, members, rank, start, stop, data.device)


def wrong(got: Tensor, operation: str, members: Members, rank: int) -> str:
    """What of `got` [n] float32 is not what this rank should have received; "" for nothing."""
    bad = torch.zeros((), dtype=torch.int64, device=got.device)
    for start, stop in _pieces(len(got)):
        expected = _expected(operation, members, rank, len(got), start, stop, got.device)
        bad += (got[start:stop] != expected).sum()
    count = int(bad)
    what = f"{operation} of ranks {members}"
    return f"{what}: {count} of {len(got)} elements arrived wrong at rank {rank}" if count else ""


def _expected(
    operation: str, members: Members, rank: int, n: int, start: int, stop: int, device: torch.device
) -> Tensor:
    ranks = members.ranks
    if operation == SEND:
        return _numbers(operation, members, ranks[0], start, stop, device)
    if operation == ALL_GATHER:
        return torch.cat(list(_gathered(operation, members, n // len(ranks), start, stop, device)))
    # Of a reduce-scatter a rank gets the sums of its own shard
    shift = 0 if operation == ALL_REDUCE else n * ranks.index(rank)
    return _summed(operation, members, ranks, start + shift, stop + shift, device)


def _gathered(
    operation: str, members: Members, share: int, start: int, stop: int, device: torch.device
) -> Iterator[Tensor]:
    for place, sender in enumerate(members.ranks):
        first, last = max(start, place * share), min(stop, (place + 1) * share)
        if first < last:
            yield _numbers(operation, members, sender, first - place * share, last - place * share, device)


def _summed(
    operation: str, members: Members, ranks: Sequence[int], start: int, stop: int, device: torch.device
) -> Tensor:
    total = _numbers(operation, members, ranks[0], start, stop, device)
    for rank in ranks[1:]:
        total += _numbers(operation, members, rank, start, stop, device)
    return total


def _numbers(
    operation: str, members: Members, rank: int, start: int, stop: int, device: torch.device
) -> Tensor:
    """[stop - start] float32: the numbers of a rank's elements from `start` on."""
    digest = hashlib.sha256(f"{operation} {members} {rank}".encode()).digest()
    key = int.from_bytes(digest[:4], "big", signed=True)
    drawn = torch.arange(start, stop, dtype=torch.int64, device=device).to(torch.int32)
    drawn ^= key
    for factor, shift in ((_FIRST, 16), (_SECOND, 15)):
        drawn ^= drawn >> shift
        drawn *= factor
    drawn >>= 32 - BITS
    drawn &= 2**BITS - 1
    return drawn.float()


def _pieces(n: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, PIECE):
        yield start, min(n, start + PIECE)
