"""Codes that ranks exchange in sequence parallelism, compared at the receiver with what each rank sent, by checksum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8core.verify.oracle import tiles
from fp8core.verify.received import position_weights

if TYPE_CHECKING:
    from fp8core.distributed.gathered import Gathered


def exchange_faults(gather: Gathered, group: dist.ProcessGroup) -> list[str]:
    """How the gathered codes and scales differ from what the ranks of `group` sent; empty if they don't.

    One all-gather of two int64 a rank, which all ranks of the group join.
    """
    placement: Any
    (placement,) = gather.like.placements
    assert placement.is_shard()
    world, K = dist.get_world_size(group), gather.like.shape[-1]
    whole, local = gather.whole, gather.local
    per_token = whole.scale_inv.dim() > 1 and whole.scale_inv.shape[-1] == 1
    sums = [_checksum(local.qdata.reshape(-1, K))]
    if per_token:
        sums.append(_checksum(local.scale_inv.reshape(-1, 1)))
    sent = torch.stack(sums)
    of_ranks = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(of_ranks, sent, group=group)
    parts = [_parts(whole.qdata.reshape(gather.like.shape), world, placement.dim)]
    if per_token:
        parts.append(_parts(whole.scale_inv.reshape(*gather.like.shape[:-1], 1), world, placement.dim))
    faults = []
    for what, of_each, expected in zip(("codes", "scales"), parts, zip(*of_ranks, strict=True), strict=False):
        wrong = [
            str(rank)
            for rank, (part, want) in enumerate(zip(of_each, expected, strict=True))
            if not torch.equal(_checksum(part.reshape(-1, part.shape[-1])), want)
        ]
        if wrong:
            faults.append(f"{what} of rank {', '.join(wrong)} did not arrive as they were sent")
    if not per_token and not torch.equal(_bits(whole.scale_inv), _bits(local.scale_inv)):
        faults.append("the scales are not those that the codes were cast by")
    return faults


def _parts(whole: torch.Tensor, world: int, dim: int) -> list[torch.Tensor]:
    """The part of each rank; ranks beyond the last part have none."""
    parts = list(whole.chunk(world, dim))
    return parts + [whole.narrow(dim, 0, 0)] * (world - len(parts))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int32)


def _checksum(matrix: torch.Tensor) -> torch.Tensor:
    """Sum of all bit patterns with random weights by position, int64 modulo 2**64, 0-d."""
    M, K = matrix.shape
    down, along = position_weights(M + K, matrix.device).split([M, K])
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    for rows, columns in tiles(M, K):
        values = _bits(matrix[rows, columns]).long() + 1
        total += ((values * down[rows, None]).sum(0) * along[columns]).sum()
    return total
